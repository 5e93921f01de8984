//! The command itself: what a reader that goes away does to it.

use std::process::{Command, Stdio};

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fastserve-sim"))
        .args(["--seed", "7", "--steps-in-flight", "1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    drop(command.stdout.take());
    let output = command.wait_with_output().expect("the command ends");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(141));
}
