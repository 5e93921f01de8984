//! The command itself: what a reader that goes away does to it.

use std::io::pipe;
use std::process::Command;

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    let (reader, writer) = pipe().expect("a pipe");
    drop(reader); // Before the command starts, so that it cannot have written all by then.
    let output = Command::new(env!("CARGO_BIN_EXE_fastserve-sim"))
        .args(["--seed", "7", "--steps-in-flight", "1"])
        .stdout(writer)
        .output()
        .expect("the command starts and ends");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(141));
}
