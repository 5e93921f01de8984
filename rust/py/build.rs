//! Two things that the wheel needs and Cargo does not know by itself.
//!
//! 1. The CUDA sources. They live in `cuda/` at the root of the repository, outside this crate, and
//!    a symlink into the Python package would be dropped from the wheel in silence. So they are
//!    copied to `OUT_DIR/cuda`, from where `[tool.maturin] include` takes them to `fastserve/cuda`.
//! 2. The distribution's name, read from `pyproject.toml`, the one place that says it. The extension
//!    exports it as `DISTRIBUTION`, so that a message can say what to install.

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("set by Cargo")).join("../..");
    let out = PathBuf::from(env::var("OUT_DIR").expect("set by Cargo"));
    copy_cuda(&root.join("cuda"), &out.join("cuda"));

    let pyproject = root.join("pyproject.toml");
    println!("cargo::rerun-if-changed={}", pyproject.display());
    println!("cargo::rustc-env=FASTSERVE_DISTRIBUTION={}", distribution(&pyproject));
}

/// Copy the kernels and their headers, and forget those that are gone.
fn copy_cuda(from: &Path, to: &Path) {
    println!("cargo::rerun-if-changed={}", from.display());
    if to.exists() {
        fs::remove_dir_all(to).expect("OUT_DIR is writable");
    }
    fs::create_dir_all(to).expect("OUT_DIR is writable");
    for entry in fs::read_dir(from).expect("the repository has a folder cuda/") {
        let path = entry.expect("cuda/ can be listed").path();
        if path.extension().is_some_and(|kind| kind == "cu" || kind == "cuh") {
            println!("cargo::rerun-if-changed={}", path.display());
            let name = path.file_name().expect("a listed file has a name");
            fs::copy(&path, to.join(name)).expect("OUT_DIR is writable");
        }
    }
}

/// The value of `name` in `[project]`. Three lines of TOML do not need a parser.
fn distribution(pyproject: &Path) -> String {
    let text = fs::read_to_string(pyproject).expect("the repository has a pyproject.toml");
    text.lines()
        .skip_while(|line| line.trim() != "[project]")
        .find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'))
        .expect("pyproject.toml has name = \"...\" in [project]")
        .to_owned()
}
