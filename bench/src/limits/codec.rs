//! A codec alone, on all cores, on the packets that moves make: what no compressed move is faster than.
use transship_codec::{Method, Outcome, Setting};
use transship_memory::{PageNumber, Region, WINDOW_PAGES};

use super::{copy, threads::on_all};
use crate::pair::text;

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
            memory.map_or(Ok(()), |memory| {
                let first = PageNumber::new(number as u64 * WINDOW_PAGES.get());
                copy::write(memory, first, pages).map_err(text)
            })
        }
    })?;
    let length = |(packet, encoded): (&&[u8], &Option<Vec<u8>>)| encoded.as_ref().map_or(packet.len(), Vec::len);
    let out: usize = packets.iter().zip(&encoded).map(length).sum();
    let all: usize = packets.iter().map(|packet| packet.len()).sum();
    Ok(CodecRun { encode_ms, decode_ms, ratio: all as f64 / out as f64 })
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
}
