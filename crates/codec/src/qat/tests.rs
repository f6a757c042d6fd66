#![allow(clippy::unwrap_used)]
//! Against Intel's own library in its software mode, where a folder has it (see docs/codecs.md).
use super::*;
use crate::{
    Decoder, Encoder,
    qatzip::{QatzipDecoder, QatzipEncoder},
};
use std::path::PathBuf;
use std::process::Command;

/// The folder of the unpacked packages; a test that needs it is left out without.
fn packages() -> Option<PathBuf> {
    let folder = std::env::var_os("TRANSSHIP_QATZIP_PACKAGES").map(PathBuf::from);
    if folder.is_none() {
        transship_lab::lacks("TRANSSHIP_QATZIP_PACKAGES names no folder (scripts/qatzip-packages.sh makes one)");
    }
    folder
}

fn pages() -> Vec<u8> {
    (0..128 * 4096u32)
        .map(|i| {
            if i / 9000 % 2 == 0 { (i.wrapping_mul(2_654_435_761) >> 24) as u8 } else { b"transship "[i as usize % 10] }
        })
        .collect()
}

fn libraries(folder: &Path) -> PathBuf {
    folder.join("usr/lib/x86_64-linux-gnu")
}

/// The unpacked `qzip` with the C library it was built for.
fn qzip(folder: &Path, arguments: &[&str]) {
    let libraries = libraries(folder);
    let output = Command::new(libraries.join("ld-linux-x86-64.so.2"))
        .arg("--library-path")
        .arg(&libraries)
        .arg(folder.join("usr/bin/qzip"))
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn we_read_what_qzip_writes() {
    let Some(folder) = packages() else { return };
    let work = tempfile::tempdir().unwrap();
    let path = work.path().join("pages");
    for level in ["1", "9"] {
        std::fs::write(&path, pages()).unwrap();
        qzip(&folder, &["-k", "-O", "gzipext", "-L", level, path.to_str().unwrap()]);
        let mut decoded = vec![0; pages().len()];
        QatzipDecoder::new().decode(&std::fs::read(work.path().join("pages.gz")).unwrap(), &mut decoded).unwrap();
        assert!(decoded == pages(), "level {level}");
        std::fs::remove_file(work.path().join("pages.gz")).unwrap();
    }
}

/// The library, with what it needs loaded before it, as the folder is not one of the system's.
fn load(folder: &Path) -> Library {
    for name in ["libusdm.so.0", "libqat.so.4", "liblz4.so.1", "libnuma.so.1"] {
        let path = libraries(folder).join(name);
        // SAFETY: libraries of the distribution, for this test alone.
        let library = unsafe { libloading::os::unix::Library::open(Some(path), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        // One that needs a newer C library than the system's is taken from the system, if at all: the load below tells.
        std::mem::forget(library);
    }
    Library::load(&libraries(folder).join(LIBRARY)).unwrap()
}

/// The calls of our own path, with the library's software instead of a device.
#[test]
fn the_loaded_library_makes_what_we_read() {
    let Some(folder) = packages() else { return };
    let library = load(&folder);
    let mut session = QatSession::open(&library, 1, 1, QZ_DIR_COMPRESS).unwrap();
    let mut encoded = Vec::new();
    for length in [4096, 65536, 128 * 4096] {
        session.compress(&pages()[..length], &mut encoded).unwrap();
        let mut decoded = vec![0; length];
        QatzipDecoder::new().decode(&encoded, &mut decoded).unwrap();
        assert!(decoded == pages()[..length]);
    }
    let without_software = QatSession::open(&library, 1, 0, QZ_DIR_COMPRESS);
    assert!(without_software.is_err() || Path::new("/dev/vfio").exists());
}

/// As QEMU's receiver does it: one call a packet. (The `qzip` command loops for ever on files of several members in its
/// software mode, also on those that it wrote itself; so the library is asked.)
#[test]
fn the_library_reads_what_we_write() {
    type Decompress =
        unsafe extern "C" fn(*mut QzSession, *const c_uchar, *mut c_uint, *mut c_uchar, *mut c_uint) -> c_int;
    const QZ_DIR_DECOMPRESS: c_uint = 1;
    let Some(folder) = packages() else { return };
    let library = load(&folder);
    // SAFETY: loaded already; the type is that of qatzip.h.
    let (_kept, decompress) = unsafe {
        let again = libloading::Library::new(libraries(&folder).join(LIBRARY)).unwrap();
        let function: Decompress = *again.get(b"qzDecompress\0").unwrap();
        (again, function)
    };
    let mut session = QatSession::open(&library, 1, 1, QZ_DIR_DECOMPRESS).unwrap();
    for (level, length) in [(1, 4096), (1, 128 * 4096), (3, 17 * 4096), (6, 128 * 4096)] {
        let mut encoded = Vec::new();
        let _ = QatzipEncoder::new(level).encode(&pages()[..length], &mut encoded);
        let mut decoded = vec![0; length];
        let (mut taken, mut made) = (encoded.len() as c_uint, length as c_uint);
        // SAFETY: both lengths are those of the buffers, the session is open.
        let code = unsafe {
            decompress(&raw mut *session.session, encoded.as_ptr(), &raw mut taken, decoded.as_mut_ptr(), &raw mut made)
        };
        assert_eq!((code, taken as usize, made as usize), (QZ_OK, encoded.len(), length), "level {level}");
        assert!(decoded == pages()[..length], "level {level}");
    }
}

#[test]
fn a_library_that_is_missing_is_named() {
    let error = Library::load(Path::new("libqatzip.so.nowhere")).err().unwrap();
    assert!(error.starts_with("can't load libqatzip.so.nowhere"), "{error}");
}

#[test]
fn without_a_device_the_reason_is_said() {
    if let Backend::Software { reason } = backend() {
        assert!(reason.contains("QAT device") || reason.contains(LIBRARY), "{reason}");
        assert!(session(1).is_none());
    }
}
