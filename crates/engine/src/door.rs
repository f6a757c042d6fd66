//! The door: all connections to a listener that have not identified themselves yet. They are heard side by side, so
//! whoever is silent keeps nobody waiting. Where a key is needed, that comes first.
use std::{
    collections::VecDeque,
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use transship_secure::{Handshake, Lack};

use crate::{Error, Listener, Progress, Rule, transport::Connection};

/// All that anybody has to say before it is known who he is.
pub(crate) const FIRST_WORDS: usize = 128;
/// At most so many are heard at once: all that a source of QEMU's can have, and some strangers.
const MOST: usize = 300;
/// How often those who are there are looked at while nobody comes.
const GLANCE: Duration = Duration::from_millis(5);

/// A connection and the address of who made it.
pub(crate) type Line = (Connection, String);

/// What somebody's first words mean.
pub(crate) enum Words<T> {
    /// More has to come.
    Unfinished,
    /// It is known who it is. The words are still in the connection, but those that were taken.
    Known(T),
    /// Why it is nobody who is waited for.
    Strange(String),
}

/// Takes a connection and its first words, up to [`FIRST_WORDS`]; it may take those that are there off the connection,
/// by [`take`].
type Understand<T> = fn(&mut Line, &[u8]) -> Words<T>;

/// Tells somebody who speaks in clear, and may be of our kind, why he is turned away.
type Refuse = fn(&mut Connection, &str);

/// The first byte of whoever begins to encrypt.
const TLS: u8 = 22;

/// The listener, and those who have come to it.
pub(crate) struct Door<'a, T> {
    listener: &'a Listener,
    progress: &'a Progress,
    /// For all of somebody's first words.
    time: Duration,
    understand: Understand<T>,
    refuse: Refuse,
    waiting: Vec<Waiting>,
    /// Connections that are identified, and were not asked for yet.
    known: VecDeque<(T, Line)>,
}

struct Waiting {
    line: Line,
    since: Instant,
    trust: Trust,
    /// It has said something that is looked at again and again.
    has_spoken: bool,
}

/// What has to be known of somebody before a word of his is heard.
enum Trust {
    /// Nothing: it is known, or need not be.
    Enough,
    /// It is known that he may not come. He is told why when he has spoken: before that he would not listen.
    Never(String),
    /// That he has the key. He has said nothing yet.
    Needed(Handshake, Lack),
    /// He is showing that.
    Shown(Handshake),
}

impl<'a, T> Door<'a, T> {
    /// `time`: for all of a connection's first bytes; one that needs longer is turned away.
    pub(crate) fn new(
        listener: &'a Listener,
        progress: &'a Progress,
        time: Duration,
        understand: Understand<T>,
        refuse: Refuse,
    ) -> Self {
        Self { listener, progress, time, understand, refuse, waiting: Vec::new(), known: VecDeque::new() }
    }

    /// Whether nobody stands there.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Somebody who is known, in the order in which they became so.
    pub(crate) fn known(&mut self) -> Option<(T, Line)> {
        self.known.pop_front()
    }

    /// Somebody who is known, or becomes so within the time. It may take less.
    ///
    /// # Errors
    /// As [`Door::look`].
    pub(crate) fn next(&mut self, timeout: Duration) -> Result<Option<(T, Line)>, Error> {
        if self.known.is_empty() {
            self.look(timeout)?;
        }
        Ok(self.known())
    }

    /// Lets in who comes, waiting for somebody for `timeout` at most, and hears everybody. Whether somebody came: there
    /// may be more.
    ///
    /// # Errors
    /// [`Error::Cancelled`]; those of the listener.
    pub(crate) fn look(&mut self, timeout: Duration) -> Result<bool, Error> {
        if self.progress.is_cancelled() {
            return Err(Error::CANCELLED);
        }
        // Those who are there may speak while nobody comes.
        let timeout = if self.is_empty() { timeout } else { timeout.min(GLANCE) };
        let silent = self.waiting.iter().filter(|visitor| !visitor.has_spoken);
        let silent: Vec<_> = silent.map(|visitor| visitor.line.0.as_fd()).collect();
        let line = self.listener.accept(timeout, &silent)?;
        let came = line.is_some();
        if let Some(line) = line {
            if self.waiting.len() >= MOST {
                let (_, peer) = self.waiting.remove(0).line;
                turn_away(&peer, "too many connections are silent");
            }
            let trust = match self.listener.lock() {
                None => self.listener.refusal(&line.0).map_or(Trust::Enough, Trust::Never),
                Some(lock) => {
                    let handshake = Handshake::hosting(&lock.host);
                    let handshake = handshake.map_err(|failure| Error::untrusted(&line.1, &failure))?;
                    Trust::Needed(handshake, lock.host.lack())
                }
            };
            self.waiting.push(Waiting { line, since: Instant::now(), trust, has_spoken: false });
        }
        for visitor in std::mem::take(&mut self.waiting) {
            let (mut visitor, trusted) = visitor.show(self.refuse);
            let words = match trusted {
                Ok(true) => visitor.hear(self.understand),
                Ok(false) => Words::Unfinished,
                Err(why) => Words::Strange(why),
            };
            match visitor.in_time(words, self.time) {
                Words::Unfinished => self.waiting.push(visitor),
                Words::Known(who) => self.known.push_back((who, visitor.line)),
                Words::Strange(why) => turn_away(&visitor.line.1, &why),
            }
        }
        Ok(came)
    }
}

impl Waiting {
    /// Finds out whether this is somebody whose words count, if that has to be known. It may take more than what has
    /// come.
    fn show(mut self, refuse: Refuse) -> (Self, Result<bool, String>) {
        let mut handshake = match self.trust {
            Trust::Enough => return (self, Ok(true)),
            Trust::Never(why) => {
                let has_spoken = match self.line.0.peek(&mut [0]) {
                    Ok(there) => there > 0,
                    Err(_) => return (Self { trust: Trust::Enough, ..self }, Err(why)),
                };
                if has_spoken {
                    refuse(&mut self.line.0, &why);
                }
                let result = if has_spoken { Err(why.clone()) } else { Ok(false) };
                return (Self { trust: Trust::Never(why), ..self }, result);
            }
            Trust::Shown(handshake) => handshake,
            Trust::Needed(handshake, lack) => {
                let needed = |handshake| Trust::Needed(handshake, lack);
                let mut first = [0; 1];
                match self.line.0.peek(&mut first) {
                    Ok(0) => return (Self { trust: needed(handshake), ..self }, Ok(false)),
                    Ok(_) if first[0] == TLS => handshake,
                    Ok(_) => {
                        refuse(&mut self.line.0, lack.cure);
                        self.trust = needed(handshake);
                        return (self, Err(format!("it speaks in clear, without a {}", lack.of)));
                    }
                    Err(error) => return (Self { trust: needed(handshake), ..self }, Err(why(&error))),
                }
            }
        };
        let (connection, peer) = self.line;
        let (connection, done) = connection.shake_hands(&mut handshake);
        let trust = if matches!(done, Ok(true)) { Trust::Enough } else { Trust::Shown(handshake) };
        (Self { line: (connection, peer), trust, ..self }, done.map_err(|failure| failure.to_string()))
    }

    /// Looks at the first words without taking any.
    fn hear<T>(&mut self, understand: Understand<T>) -> Words<T> {
        // Asked before the words are looked at: what came before the end is there.
        let has_ended = has_ended(&self.line.0);
        let mut room = [0; FIRST_WORDS];
        let there = match self.line.0.peek(&mut room) {
            Ok(there) => there,
            Err(error) => return Words::Strange(why(&error)),
        };
        self.has_spoken = there > 0;
        let words = if there == 0 { Words::Unfinished } else { understand(&mut self.line, &room[..there]) };
        match words {
            Words::Unfinished if has_ended => Words::Strange("it has closed the connection".into()),
            words => words,
        }
    }

    /// Nobody has more than `time` for all of it.
    fn in_time<T>(&self, words: Words<T>, time: Duration) -> Words<T> {
        match words {
            Words::Unfinished if self.since.elapsed() >= time => {
                let silent = !self.has_spoken && !matches!(self.trust, Trust::Shown(_));
                let heard = if silent { "nothing" } else { "too little" };
                Words::Strange(format!("it has sent {heard} for {} s", time.as_secs()))
            }
            words => words,
        }
    }
}

/// Why somebody can't be heard.
fn why(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "it has closed the connection".into(),
        _ => error.to_string(),
    }
}

/// Tells the user of somebody who came and is not wanted.
pub(crate) fn turn_away(peer: &str, why: &str) {
    tracing::warn!("turned {peer} away: {why}");
}

/// Takes words that were seen to be there.
///
/// # Errors
/// The connection has broken.
pub(crate) fn take(connection: &mut Connection, bytes: &mut [u8]) -> io::Result<()> {
    io::Read::read_exact(connection, bytes)
}

/// Puts data connection `number` of a session where it belongs. `what`: what a session calls it.
///
/// # Errors
/// There is no such place, or it is taken.
pub(crate) fn take_place(found: &mut [Option<Line>], number: u8, line: Line, what: &str) -> Result<(), Error> {
    let announced = found.len();
    match found.get_mut(usize::from(number)) {
        Some(place @ None) => {
            *place = Some(line);
            Ok(())
        }
        _ => {
            let what = format!("opened data {what} {number} twice or beyond the {announced} that it announced");
            Err(Error::breach(line.1, Rule::Channels, what))
        }
    }
}

/// Whether nothing more can come than what is there.
fn has_ended(connection: &Connection) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut ready = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::RDHUP)];
    poll(&mut ready, Some(&now)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        io::{Read, Write},
        net::TcpStream,
    };

    use super::*;
    use crate::Uri;

    const WANTED: usize = 4;

    fn listener() -> (Listener, u16) {
        let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        let Uri::Tcp { port, .. } = *listener.uri() else { panic!() };
        (listener, port)
    }

    fn dial(port: u16) -> TcpStream {
        TcpStream::connect(("127.0.0.1", port)).unwrap()
    }

    /// Four bytes are known.
    fn understand(_: &mut Line, words: &[u8]) -> Words<Vec<u8>> {
        if words.len() < WANTED { Words::Unfinished } else { Words::Known(words.to_vec()) }
    }

    /// Looks until nobody comes any more.
    fn all(door: &mut Door<'_, Vec<u8>>) -> Vec<Vec<u8>> {
        while door.look(Duration::ZERO).unwrap() {}
        std::iter::from_fn(|| door.known()).map(|(who, _)| who).collect()
    }

    /// Looks until somebody is known.
    fn next(door: &mut Door<'_, Vec<u8>>) -> Vec<u8> {
        loop {
            let mut known = all(door);
            assert!(known.len() <= 1, "{known:?}");
            if let Some(known) = known.pop() {
                return known;
            }
        }
    }

    #[test]
    fn everybody_is_heard_however_slowly_others_speak() {
        let ((listener, port), progress) = (listener(), Progress::new());
        let mut door = Door::new(&listener, &progress, Duration::from_secs(3600), understand, |_, _| ());
        let silent: Vec<_> = (0..10).map(|_| dial(port)).collect();
        let mut slow: Vec<_> = (0..10).map(|_| dial(port)).collect();
        for byte in *b"slo" {
            slow.iter_mut().for_each(|slow| slow.write_all(&[byte]).unwrap());
            dial(port).write_all(b"quick").unwrap();
            assert_eq!(next(&mut door), b"quick");
        }
        for slow in &mut slow {
            slow.write_all(b"w").unwrap();
            assert_eq!(next(&mut door), b"slow");
        }
        assert_eq!(door.waiting.len(), silent.len());
    }

    /// A byte now and then buys no time.
    #[test]
    fn first_words_have_their_time_in_all() {
        let ((listener, port), progress) = (listener(), Progress::new());
        let mut door = Door::new(&listener, &progress, Duration::from_millis(300), understand, |_, _| ());
        let mut dribbling = dial(port);
        while door.is_empty() {
            assert!(all(&mut door).is_empty());
        }
        let since = door.waiting[0].since;
        dribbling.write_all(b"a").unwrap();
        while !door.is_empty() {
            assert!(all(&mut door).is_empty());
            assert!(door.waiting.iter().all(|waiting| waiting.since == since), "it began anew");
        }
        assert!(matches!(dribbling.read(&mut [0]), Ok(0) | Err(_)), "it is turned away");
    }

    #[test]
    fn who_hangs_up_with_half_a_word_is_turned_away_at_once() {
        let ((listener, port), progress) = (listener(), Progress::new());
        let mut door = Door::new(&listener, &progress, Duration::from_secs(3600), understand, |_, _| ());
        let mut visitor = dial(port);
        visitor.write_all(b"ab").unwrap();
        while door.is_empty() {
            assert!(all(&mut door).is_empty());
        }
        drop(visitor);
        while !door.is_empty() {
            assert!(all(&mut door).is_empty());
        }
    }

    #[test]
    fn a_flood_pushes_out_those_who_have_waited_longest() {
        let ((listener, port), progress) = (listener(), Progress::new());
        let mut door = Door::new(&listener, &progress, Duration::from_secs(3600), understand, |_, _| ());
        let mut first = dial(port);
        let flood: Vec<_> = (0..MOST + 10)
            .map(|_| {
                let stranger = dial(port);
                assert!(all(&mut door).is_empty() && door.waiting.len() <= MOST);
                stranger
            })
            .collect();
        while door.waiting.len() < MOST {
            all(&mut door);
        }
        assert!(matches!(first.read(&mut [0]), Ok(0) | Err(_)), "it is turned away");
        drop(flood);
    }

    #[test]
    fn the_user_is_heard() {
        let ((listener, _), progress) = (listener(), Progress::new());
        let mut door = Door::new(&listener, &progress, Duration::from_secs(3600), understand, |_, _| ());
        progress.cancel();
        assert!(matches!(door.look(Duration::ZERO), Err(Error::Cancelled(_))));
    }
}
