//! A codec alone, on all cores, on the packets that moves make: what no compressed move is faster than.
use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
    time::Instant,
};

use transship_codec::{Method, Outcome, Setting};
use transship_memory::{PAGE_BYTES, PageCount, PageNumber, Region, WINDOW_PAGES};

use crate::{pair::text, units::millis};

/// As the packets of a move.
pub(crate) const PACKET_BYTES: usize = WINDOW_PAGES.buffer_bytes();

/// What a codec did with all packets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CodecRun {
    pub(crate) encode_ms: f64,
    pub(crate) decode_ms: f64,
    /// Bytes that went in for each that came out.
    pub(crate) ratio: f64,
}

/// Encodes all packets and decodes them, by so many threads each time; into guest memory if that is given, which has
/// room for them.
pub(crate) fn alone(
    method: Method,
    packets: &[&[u8]],
    threads: usize,
    memory: Option<&Region>,
) -> Result<CodecRun, String> {
    let setting = Setting::new(method, None).map_err(|error| error.to_string())?;
    let (encode_ms, encoded) = on_all(packets.len(), threads, || {
        let (mut encoder, mut out) = (setting.encoder(), Vec::new());
        move |number| {
            // Those that don't shrink are sent as they are.
            let kept = match encoder.encode(packets[number], &mut out) {
                Outcome::Encoded => Some(out.clone()),
                Outcome::Raw => None,
            };
            Ok(kept)
        }
    })?;
    let (decode_ms, _) = on_all(packets.len(), threads, || {
        let (mut decoder, mut pages, encoded) = (method.decoder(), vec![0; PACKET_BYTES], &encoded);
        move |number: usize| {
            let pages = &mut pages[..packets[number].len()];
            match &encoded[number] {
                Some(bytes) => decoder.decode(bytes, pages).map_err(text)?,
                None => pages.copy_from_slice(packets[number]),
            }
            memory.map_or(Ok(()), |memory| write(memory, number, pages))
        }
    })?;
    let length = |(packet, encoded): (&&[u8], &Option<Vec<u8>>)| encoded.as_ref().map_or(packet.len(), Vec::len);
    let out: usize = packets.iter().zip(&encoded).map(length).sum();
    let all: usize = packets.iter().map(|packet| packet.len()).sum();
    Ok(CodecRun { encode_ms, decode_ms, ratio: all as f64 / out as f64 })
}

/// Puts a packet into its place.
fn write(memory: &Region, number: usize, pages: &[u8]) -> Result<(), String> {
    let first = PageNumber::new(number as u64 * WINDOW_PAGES.get());
    let range = first.run(PageCount::new((pages.len() / PAGE_BYTES) as u64));
    range.windows().try_for_each(|window| memory.write_pages(window, pages).map_err(text))
}

/// Has threads do all of so many pieces of work, and gives the time and the results in their order.
fn on_all<T: Send, W: FnMut(usize) -> Result<T, String> + Send>(
    count: usize,
    threads: usize,
    worker: impl Fn() -> W,
) -> Result<(f64, Vec<T>), String> {
    let next = AtomicUsize::new(0);
    let begin = Instant::now();
    let mut done: Vec<(usize, T)> = thread::scope(|scope| {
        let next = &next;
        let all: Vec<_> = (0..threads)
            .map(|_| {
                let mut work = worker();
                scope.spawn(move || {
                    // A counter: nothing else is published by it.
                    let numbers =
                        std::iter::from_fn(|| Some(next.fetch_add(1, Relaxed)).filter(|number| *number < count));
                    numbers.map(|number| Ok((number, work(number)?))).collect::<Result<Vec<_>, String>>()
                })
            })
            .collect();
        let mut done = Vec::new();
        for thread in all {
            done.extend(thread.join().map_err(|_| "a thread of a codec panicked")??);
        }
        Ok::<_, String>(done)
    })?;
    let ms = millis(begin.elapsed());
    done.sort_by_key(|(number, _)| *number);
    Ok((ms, done.into_iter().map(|(_, result)| result).collect()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use transship_memory::PageRange;

    use super::*;
    use crate::{corpus::Corpus, limits::copy::Memory};

    #[test]
    fn what_shrinks_has_a_ratio_and_what_does_not_has_none() {
        let corpus = Corpus::new(None, 8 << 20).unwrap();
        let packets: Vec<&[u8]> = corpus.packets(PACKET_BYTES).collect();
        let run = alone(Method::Zstd, &packets, 3, None).unwrap();
        assert!(run.ratio > 2.0 && run.ratio < 6.0 && run.encode_ms > 0.0 && run.decode_ms > 0.0, "{run:?}");
        assert_eq!(alone(Method::None, &packets, 2, None).unwrap().ratio, 1.0);
    }

    #[test]
    fn packets_are_decoded_into_their_places() {
        let corpus = Corpus::new(None, 8 << 20).unwrap();
        let packets: Vec<&[u8]> = corpus.packets(PACKET_BYTES).collect();
        let memory = Memory::fresh(Path::new("/dev/shm"), 8 << 20).unwrap();
        for method in [Method::Zstd, Method::None] {
            alone(method, &packets, 3, Some(&memory.region)).unwrap();
            let mut found = vec![0; 8 << 20];
            memory.region.copy_to(PageRange::all(memory.region.pages()), &mut found).unwrap();
            assert!(found == packets.concat(), "{method:?}");
            memory.fill().unwrap();
        }
    }

    #[test]
    fn results_come_in_the_order_of_the_work() {
        let (_, squares) = on_all(100, 4, || |number| Ok(number * number)).unwrap();
        assert_eq!(squares, (0..100).map(|number| number * number).collect::<Vec<_>>());
        let failed = on_all(9, 2, || |number| if number == 7 { Err("seven".to_owned()) } else { Ok(()) });
        assert_eq!(failed.unwrap_err(), "seven");
    }
}
