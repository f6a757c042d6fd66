//! Pages on their way out: through sockets and pipes, and into files.
use std::{
    fs::File,
    io::{self, Read},
    os::{fd::AsFd, unix::net::UnixStream},
    thread,
    time::Duration,
};

use transship_memory::{Access, PageCount, Region, WindowBuffer, WindowPages};

use crate::common::{PAGE, file, map, page_of};

/// Ranges of a window that need the most parts, and others.
const WINDOWS: [(u64, u128); 5] =
    [(0, u128::MAX), (128, 0x5555_5555_5555_5555_5555_5555_5555_5555), (128, 0), (7, 1 << 127), (250, 0xf0f)];

fn filled() -> Region {
    let region = map(file(300 * PAGE), 300 * PAGE, Access::ReadWrite);
    for number in 0..300 {
        region.write_pages(WindowPages::new(number, 1), &page_of(number)).unwrap();
    }
    region
}

/// The bytes that the windows are sent as, by the plain way.
fn expected(region: &Region) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (at, &(first, bits)) in WINDOWS.iter().enumerate() {
        bytes.extend([at as u8; 24]);
        for bit in (0..128).filter(|bit| bits >> bit & 1 == 1) {
            bytes.extend(page_of(first + bit));
        }
    }
    assert!(region.pages() == PageCount::new(300));
    bytes
}

fn send_all(region: &Region, to: &impl AsFd) -> io::Result<()> {
    let mut buffer = WindowBuffer::default();
    WINDOWS.iter().enumerate().try_for_each(|(at, &(first, bits))| {
        let (to, head, pages) = (to.as_fd(), [at as u8; 24], WindowPages::new(first, bits));
        let read = region.read_window(pages, true, &mut buffer).unwrap();
        if at % 2 == 0 { read.send(to, &head, pages) } else { read.send_apart(to, &head, pages) }
    })
}

/// Makes SIGUSR1 interrupt what the thread does, and nothing else.
fn let_signals_interrupt() {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: a sigaction is plain integers and pointers, for which zero means no flags (no SA_RESTART) and no mask;
    // the handler does nothing, so it may run at any moment.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut())
    };
    assert_eq!(result, 0);
}

/// A socket whose buffer is far smaller than a window, and a signal after each little read: it mostly meets a writer
/// that waits with a part of the window written, and gets a short write; or one that has written nothing, and gets
/// EINTR.
#[test]
fn windows_go_through_a_socket_in_short_writes() {
    let_signals_interrupt();
    let region = filled();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
    let expected = expected(&region);
    // SAFETY: asks for the number of this thread.
    let writer = unsafe { libc::pthread_self() };
    let reader = thread::spawn(move || {
        let (mut got, mut some) = (Vec::<u8>::new(), vec![0; 1237]);
        loop {
            match theirs.read(&mut some).unwrap() {
                0 => return got,
                count => got.extend(&some[..count]),
            }
            // SAFETY: the writer joins this thread whatever happens, so it is there; the signal has a handler.
            assert_eq!(unsafe { libc::pthread_kill(writer, libc::SIGUSR1) }, 0);
        }
    });
    let sent = send_all(&region, &ours);
    drop(ours);
    assert!(reader.join().unwrap() == expected);
    sent.unwrap();
}

#[test]
fn windows_go_through_pipes_and_into_files() {
    let region = filled();
    let expected = expected(&region);
    let (mut reader, writer) = io::pipe().unwrap();
    let reading = thread::spawn(move || {
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        got
    });
    send_all(&region, &writer).unwrap();
    drop(writer);
    assert!(reading.join().unwrap() == expected);

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stream");
    send_all(&region, &File::create(&path).unwrap()).unwrap();
    assert!(std::fs::read(&path).unwrap() == expected);
}

#[test]
fn a_peer_that_is_gone_or_stuck_is_an_error() {
    let region = filled();
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_write_timeout(Some(Duration::from_millis(10))).unwrap();
    let mut buffer = WindowBuffer::default();
    let pages = WindowPages::new(0, u128::MAX);
    let read = region.read_window(pages, true, &mut buffer).unwrap();
    let stuck = (0..100).find_map(|_| read.send(ours.as_fd(), b"head", pages).err());
    assert_eq!(stuck.unwrap().kind(), io::ErrorKind::WouldBlock);
    drop(theirs);
    let gone = read.send(ours.as_fd(), b"head", WindowPages::new(0, 1)).unwrap_err();
    assert_eq!(gone.kind(), io::ErrorKind::BrokenPipe);
}

/// Each page behind a head of its own, and something behind the last one.
#[test]
fn pages_are_woven_into_what_goes_to_a_file() {
    let (region, mut buffer) = (filled(), WindowBuffer::default());
    let file = file(0);
    let mut at = 100;
    for (number, &(first, bits)) in WINDOWS.iter().enumerate() {
        let pages = WindowPages::new(first, bits);
        let (mut bytes, mut cuts, mut expected) = (Vec::new(), Vec::new(), Vec::new());
        for page in pages.iter() {
            let head = vec![number as u8; (page.get() % 9) as usize];
            bytes.extend(&head);
            cuts.push(bytes.len());
            expected.extend(head);
            expected.extend(page_of(page.get()));
        }
        bytes.extend(b"tail");
        expected.extend(b"tail");
        let read = region.read_window(pages, false, &mut buffer).unwrap();
        read.write_woven(file.as_fd(), at, &bytes, &cuts).unwrap();
        let mut found = vec![0; expected.len() + 1];
        assert_eq!(rustix::io::pread(&file, &mut found, at).unwrap(), expected.len(), "no more and no less");
        assert!(found[..expected.len()] == expected, "window {number}");
        at += expected.len() as u64;
    }
    assert_eq!(rustix::fs::fstat(&file).unwrap().st_size as u64, at);
    let read = region.read_window(WindowPages::new(0, 1), false, &mut buffer).unwrap();
    let unfit = read.write_woven(File::open("/dev/null").unwrap().as_fd(), 0, b"head", &[4]);
    assert_eq!(unfit.unwrap_err().raw_os_error(), Some(libc::EBADF));
}
