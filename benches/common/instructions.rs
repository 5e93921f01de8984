//! Instructions of a step, exactly, whatever else the machine does.

use std::io::ErrorKind;
use std::process::Command;

const FEW: u64 = 100;
const MANY: u64 = 300;
/// Tells a bench that it runs to be counted, and counts nothing itself.
pub const COUNTED: &str = "--counted";

/// Instructions of a step below `function`, by valgrind: this program is run with `arguments` and two
/// numbers of `--steps`, and the difference of the counts is the additional steps' alone. `None` where
/// there is no valgrind.
///
/// # Panics
///
/// If valgrind does not run to its end, or says no count.
pub fn of_a_step(function: &str, arguments: &[String]) -> Option<u64> {
    let (few, many) = (total(function, arguments, FEW)?, total(function, arguments, MANY)?);
    Some((many - few + (MANY - FEW) / 2) / (MANY - FEW))
}

/// Instructions of a whole run, the preparation's share included.
fn total(function: &str, arguments: &[String], steps: u64) -> Option<u64> {
    let program = std::env::current_exe().expect("a program knows its path");
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(format!("--toggle-collect=*{function}*"))
        .arg(program)
        .args(arguments)
        .args([COUNTED, "--steps", &steps.to_string()])
        .output();
    let run = match run {
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        run => run.expect("valgrind can be started"),
    };
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "valgrind: {said}");
    let count = said.lines().find_map(|line| line.split_once("Collected : "));
    let (_, count) = count.unwrap_or_else(|| panic!("valgrind said no count: {said}"));
    Some(count.trim().parse().expect("a count is a number"))
}
