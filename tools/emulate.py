"""Run tests of the CPU kernels on a processor that this machine does not have.

    make test-avx512                           most of the kernels' tests; takes long
    make test-avx512 ARGS="--tests product"    some of them
    make test-avx512 ARGS="--cpu corei7_skylake_x --without"
    make test-avx512 ARGS="--kernel FILE"      a Linux kernel image of your own

Bochs emulates an x86 processor with AVX-512 and VNNI, instruction by instruction; version 2.8 and
later (Debian 13 has 3.0) know one with BF16, and can take from it what no test needs and a kernel
would meet. It starts a Linux kernel whose only program runs the test binaries, one after the other,
and prints what they print.
That is some hundred times slower than a processor: the tests are those that take a second on one.
The kernel is the newest of ``/boot``, or else Debian's cloud kernel, which apt-get fetches. Linux
6.12 (Debian 13's) is known to work; Linux 6.1 (Debian 12's) stands still, and is refused.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / "target" / "emulator"
PROGRAMS = ("bochs", "busybox", "cpio", "gzip", "ldd", "strip", "xorriso")
BOOT_FILES = (
    Path("/usr/lib/ISOLINUX/isolinux.bin"),
    Path("/usr/lib/syslinux/modules/bios/ldlinux.c32"),
    Path("/usr/share/bochs/BIOS-bochs-latest"),
    Path("/usr/share/vgabios/vgabios.bin"),
)
REMEDY = (
    "`apt-get install bochs bochs-term bochsbios vgabios busybox-static cpio xorriso isolinux "
    "syslinux-common binutils`"
)
QUICK = ("lib", "int8", "bf16", "quantized", "decode", "decoder", "sampling", "elementwise")
OLDEST_KERNEL = (6, 12)
OLDEST_WITH_BF16 = (2, 8)
DONE = "every test was run"

INIT = f"""#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t tmpfs tmpfs /tmp
echo instruction sets: $(/bin/busybox grep -m 1 -o "avx[^ ]*" /proc/cpuinfo)
for test in /tests/*; do
    echo "running $test"
    "$test" --test-threads=1
    echo "exit status $? of $test"
done
echo "{DONE}"
/bin/busybox sleep 10
/bin/busybox poweroff -f
"""

KERNEL_ARGUMENTS = (
    "initrd=/initrd.gz",
    "rdinit=/init",
    "console=ttyS0",
    "earlyprintk=serial,ttyS0,115200",
    "ignore_loglevel",
    "tsc=reliable",
    "lpj=1000000",
    "mitigations=off",
    "nokaslr",
    "no5lvl",  # Bochs 3.0 does not come back from system management with five levels of pages.
    "panic=1",
    "random.trust_cpu=on",
)

ISOLINUX = f"""SERIAL 0 115200
DEFAULT tests
PROMPT 0
TIMEOUT 1
LABEL tests
  KERNEL /vmlinuz
  APPEND {" ".join(KERNEL_ARGUMENTS)}
"""

BOCHSRC = """display_library: rfb, options="timeout=0"
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
cpu: model={cpu}, count=1, ips=100000000, reset_on_triple_fault=1, ignore_bad_msrs=1
megs: 1024
ata0-master: type=cdrom, path={image}, status=inserted
boot: cdrom
clock: sync=none
sound: waveoutdrv=dummy
com1: enabled=1, mode=file, dev={serial}
log: {log}
panic: action=fatal
error: action=ignore
"""


def main() -> int:
    """Build, boot, watch. Returns the process's exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tests", nargs="+", default=QUICK, help="`lib`, or files of rust/cpu/tests"
    )
    parser.add_argument("--cpu", help="of `bochs --help cpu`; by default the newest that is known")
    parser.add_argument("--without", nargs="*", help="taken from it; by default AMX and CET")
    parser.add_argument("--kernel", type=Path, help="a Linux kernel image; by default a Debian one")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for all of it")
    arguments = parser.parse_args()
    if wanting := missing():
        print(f"fastserve: {', '.join(wanting)} missing; {REMEDY}", file=sys.stderr)
        return 1
    shutil.rmtree(FOLDER / "root", ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    image_of = arguments.kernel or kernel()
    if is_too_old(image_of.name):
        print(
            f"fastserve: {image_of} stands still in the emulator; give a later one, of Linux "
            f"{OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or newer, by --kernel",
            file=sys.stderr,
        )
        return 1
    image = make_image(binaries(arguments.tests), image_of)
    cpu, without = processor(bochs_version())
    if arguments.without is not None:
        without = arguments.without
    lines = []
    for line in boot(image, arguments.cpu or cpu, without, arguments.timeout):
        print(line, flush=True)
        lines.append(line)
    return verdict(lines, len(arguments.tests))


def is_too_old(name: str) -> bool:
    """Whether a kernel's file name has a version, and one that is known not to work."""
    found = re.search(r"(\d+)\.(\d+)", name)
    return found is not None and (int(found[1]), int(found[2])) < OLDEST_KERNEL


def missing() -> list[str]:
    """What is not installed."""
    programs = [name for name in PROGRAMS if shutil.which(name) is None]
    return programs + [str(path) for path in BOOT_FILES if not path.exists()]


def bochs_version() -> tuple[int, int]:
    """Of the emulator that is installed."""
    said = subprocess.run(["bochs", "--help"], capture_output=True, text=True, check=False)
    found = re.search(r"Bochs x86 Emulator (\d+)\.(\d+)", said.stdout + said.stderr)
    if found is None:
        sys.exit("fastserve: `bochs --help` says no version")
    return int(found[1]), int(found[2])


def processor(version: tuple[int, int]) -> tuple[str, list[str]]:
    """The newest that a version of Bochs has and Linux is known to start on, and without what."""
    if version >= OLDEST_WITH_BF16:
        return "sapphire_rapids", ["amx", "amx_int8", "amx_bf16", "cet", "uintr"]
    return "tigerlake", []


def binaries(names: list[str]) -> dict[str, Path]:
    """Build the tests. Returns their binaries by name."""
    command = ["cargo", "test", "--quiet", "--package", "fastserve-cpu", "--no-run"]
    for name in names:
        command += ["--lib"] if name == "lib" else ["--test", name]
    command += ["--message-format", "json"]
    built = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Path] = {}
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["profile"]["test"]:
            is_lib = "lib" in message["target"]["kind"]
            found["lib" if is_lib else message["target"]["name"]] = Path(message["executable"])
    return {name: found[name] for name in names}


def kernel() -> Path:
    """A kernel that boots from an initial file system alone."""
    for folder in (Path("/boot"), FOLDER / "kernel" / "boot"):
        if kernels := sorted(folder.glob("vmlinuz-*"), key=lambda path: path.stat().st_mtime):
            return kernels[-1]
    found = subprocess.run(
        ["apt-cache", "depends", "linux-image-cloud-amd64"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    name = re.search(r"Depends: (linux-image-\S+)", found.stdout)
    if name is None:
        sys.exit("fastserve: no kernel in /boot, and apt knows no linux-image-cloud-amd64")
    print(f"fetching {name[1]}", flush=True)
    subprocess.run(["apt-get", "--quiet", "download", name[1]], cwd=FOLDER, check=True)
    (package,) = FOLDER.glob(f"{name[1]}_*.deb")
    subprocess.run(["dpkg-deb", "--extract", package, FOLDER / "kernel"], check=True)
    return kernel()


def make_image(tests: dict[str, Path], kernel: Path) -> Path:
    """A disc with the kernel, and a file system in memory with the tests and what they load."""
    root, disc = FOLDER / "root", FOLDER / "root" / "disc"
    files = root / "files"
    for folder in ("bin", "proc", "tmp", "dev", "tests"):
        (files / folder).mkdir(parents=True)
    (disc / "isolinux").mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", files / "bin" / "busybox")
    for name, binary in tests.items():
        subprocess.run(["strip", "-o", files / "tests" / name, binary], check=True)
        for library in libraries(binary):
            place = files / library.relative_to("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, place)
    (files / "init").write_text(INIT)
    (files / "init").chmod(0o755)
    pack = f"find . | cpio --quiet -o -H newc | gzip -1 > {disc}/initrd.gz"
    subprocess.run(["sh", "-c", pack], cwd=files, check=True)
    shutil.copy(kernel, disc / "vmlinuz")
    for path in BOOT_FILES[:2]:
        shutil.copy(path, disc / "isolinux")
    (disc / "isolinux" / "isolinux.cfg").write_text(ISOLINUX)
    image = FOLDER / "tests.iso"
    command = ["xorriso", "-as", "mkisofs", "-quiet", "-o", str(image), "-b"]
    command += ["isolinux/isolinux.bin", "-c", "isolinux/boot.cat", "-no-emul-boot"]
    command += ["-boot-load-size", "4", "-boot-info-table", str(disc)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return image


def libraries(binary: Path) -> list[Path]:
    """What the loader loads for a program, itself included."""
    listed = subprocess.run(["ldd", binary], check=True, stdout=subprocess.PIPE, text=True)
    return [Path(path) for path in re.findall(r"(/\S+) \(0x", listed.stdout)]


def boot(image: Path, cpu: str, without: list[str], timeout_s: float) -> Iterator[str]:
    """Run the emulator, line by line of what its serial port says, until all tests were run."""
    serial, config = FOLDER / "serial.txt", FOLDER / "bochsrc"
    serial.write_text("")
    log = FOLDER / "bochs.log"
    if without:
        cpu += f', exclude_features="{" ".join(without)}"'
    config.write_text(BOCHSRC.format(cpu=cpu, image=image, serial=serial, log=log))
    # Where Debian's Bochs has its debugger, that asks first.
    commands = FOLDER / "debugger.rc"
    commands.write_text("continue\n")
    command = ["bochs", "-q", "-f", str(config), "-rc", str(commands)]
    deadline = time.monotonic() + timeout_s
    with (FOLDER / "console.txt").open("w") as console, serial.open(errors="replace") as port:
        emulator = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT
        )
        try:
            text = ""
            while True:
                ended = emulator.poll() is not None or time.monotonic() > deadline
                text += port.read()
                *lines, text = text.split("\n")
                yield from (line.rstrip("\r") for line in lines)
                if ended or any(DONE in line for line in lines):
                    return
                time.sleep(0.5)
        finally:
            emulator.kill()
            emulator.wait()


def verdict(lines: list[str], num_tests: int) -> int:
    """Say what came of it. Returns the process's exit status."""
    statuses = [int(found[1]) for line in lines if (found := re.match(r"exit status (\d+)", line))]
    if len(statuses) < num_tests:
        print(f"{len(statuses)} of {num_tests} tests ended; see {FOLDER.relative_to(REPOSITORY)}")
        return 1
    failed = sum(status != 0 for status in statuses)
    print(f"{num_tests} test binaries, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
