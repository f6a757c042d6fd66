//! Speed and ratio of every method on a folder's files, one thread: `speed DIR [METHOD[:LEVEL] ...]`.
//!
//! Files are cut into packets of 128 pages; the last, shorter one is filled with zeros. Each line is the best of
//! three passes.
use std::time::{Duration, Instant};
use transship_codec::{Outcome, Setting};

const PACKET: usize = 128 * 4096;
const PASSES: usize = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("usage: speed DIR [METHOD[:LEVEL] ...]")?;
    let mut settings = arguments.map(|text| text.parse()).collect::<Result<Vec<Setting>, _>>()?;
    if settings.is_empty() {
        let all = [
            "zlib:0", "zlib:1", "zlib:2", "zlib:3", "zlib:6", "zstd:-5", "zstd:-1", "zstd:1", "zstd:3", "qatzip:1",
            "lz4:1",
        ];
        settings = all.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
    }
    let packets = read_packets(&folder)?;
    println!("{:10} {:>7} {:>12} {:>12} {:>5}", "method", "ratio", "encode MB/s", "decode MB/s", "raw");
    for setting in settings {
        measure(setting, &packets)?;
    }
    Ok(())
}

fn read_packets(folder: &str) -> std::io::Result<Vec<Vec<u8>>> {
    let mut packets = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let bytes = std::fs::read(entry?.path())?;
        packets.extend(bytes.chunks(PACKET).map(|chunk| {
            let mut packet = chunk.to_vec();
            packet.resize(PACKET, 0);
            packet
        }));
    }
    Ok(packets)
}

fn measure(setting: Setting, packets: &[Vec<u8>]) -> Result<(), Box<dyn std::error::Error>> {
    let (mut encoder, mut decoder) = (setting.encoder(), setting.method().decoder());
    let mut encoded = vec![Vec::new(); packets.len()];
    let (mut encode, mut decode, mut raw) = (Duration::MAX, Duration::MAX, 0);
    let mut pages = vec![0; PACKET];
    for _ in 0..PASSES {
        let begin = Instant::now();
        let outcomes = packets.iter().zip(&mut encoded).map(|(packet, out)| encoder.encode(packet, out));
        raw = outcomes.filter(|outcome| *outcome == Outcome::Raw).count();
        encode = encode.min(begin.elapsed());
        let begin = Instant::now();
        for bytes in &encoded {
            decoder.decode(bytes, &mut pages)?;
        }
        decode = decode.min(begin.elapsed());
    }
    let (before, after) = (packets.len() * PACKET, encoded.iter().map(Vec::len).sum::<usize>());
    let rate = |time: Duration| before as f64 / time.as_secs_f64() / 1e6;
    println!(
        "{:10} {:7.2} {:12.0} {:12.0} {raw:5}",
        setting.to_string(),
        before as f64 / after as f64,
        rate(encode),
        rate(decode)
    );
    Ok(())
}
