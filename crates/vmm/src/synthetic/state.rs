//! The device state of a synthetic guest: what it does, and how often it has written each page.
//!
//! | bytes | what |
//! | --- | --- |
//! | 8 | `TSSYNTH1` |
//! | 4 | length of the program, little-endian as all numbers here |
//! | | the program: JSON |
//! | 8 | number of runs |
//! | | each run: first page (8), pages (4), the version of each (4, never 0). Runs ascend; all other versions are 0 |
//! | 8 | checksum of all before |
use std::{io::Read, sync::atomic::AtomicU32};

use super::{
    machine::{Machine, Program},
    pattern::mix,
};

const MAGIC: &[u8; 8] = b"TSSYNTH1";
/// The hashes of the largest corpus (2^18 pages), written out, and some more.
const MAX_PROGRAM_BYTES: u32 = 16 << 20;
const RUN_HEAD_BYTES: u64 = 12;

pub(super) fn encode(machine: &Machine) -> Result<Vec<u8>, String> {
    let program = Program { writes: machine.writes(), ..machine.program.clone() };
    let text = serde_json::to_vec(&program).map_err(|e| e.to_string())?;
    let length = u32::try_from(text.len()).ok().filter(|&n| n <= MAX_PROGRAM_BYTES);
    let length = length.ok_or_else(|| format!("its program has {} bytes, too many", text.len()))?;
    let mut state = MAGIC.to_vec();
    state.extend(length.to_le_bytes());
    state.extend(text);
    let runs = runs(machine);
    state.extend((runs.len() as u64).to_le_bytes());
    for (first, count) in runs {
        state.extend(first.to_le_bytes());
        state.extend(count.to_le_bytes());
        (first..first + u64::from(count)).for_each(|page| state.extend(machine.version(page).to_le_bytes()));
    }
    state.extend(checksum(&state).to_le_bytes());
    Ok(state)
}

/// Maximal runs of pages that were written: first, count.
fn runs(machine: &Machine) -> Vec<(u64, u32)> {
    let mut runs: Vec<(u64, u32)> = Vec::new();
    for page in (0..machine.program.pages()).filter(|&page| machine.version(page) != 0) {
        match runs.last_mut() {
            Some((first, count)) if *first + u64::from(*count) == page && *count < u32::MAX => *count += 1,
            _ => runs.push((page, 1)),
        }
    }
    runs
}

/// Reads a state to the end of the stream, for a guest of `regions` regions of `region_pages` pages.
pub(super) fn decode(
    from: &mut dyn Read,
    regions: u64,
    region_pages: u64,
) -> Result<(Program, Box<[AtomicU32]>), String> {
    let pages = regions * region_pages;
    // A run of its own for every page is the most that the versions can take.
    let most = u64::from(MAX_PROGRAM_BYTES) + pages * (RUN_HEAD_BYTES + 4) + 64;
    let mut bytes = Vec::new();
    from.take(most + 1).read_to_end(&mut bytes).map_err(|e| format!("can't read its device state: {e}"))?;
    if bytes.len() as u64 > most {
        return Err(format!("its device state has more than {most} bytes"));
    }
    let (content, sum) = bytes.split_last_chunk::<8>().ok_or("its device state is cut short")?;
    if checksum(content) != u64::from_le_bytes(*sum) {
        return Err(format!("its device state of {} bytes is damaged or cut short", bytes.len()));
    }
    let mut fields = Fields(content);
    if fields.take::<8>()? != *MAGIC {
        return Err("its device state is not that of a synthetic guest".into());
    }
    let length = u32::from_le_bytes(fields.take()?);
    let program: Program =
        serde_json::from_slice(fields.bytes(length as usize)?).map_err(|e| format!("its program: {e}"))?;
    check_program(&program, regions, region_pages)?;
    let versions = decode_versions(&mut fields, pages)?;
    if !fields.0.is_empty() {
        return Err(format!("{} bytes are left after its device state", fields.0.len()));
    }
    Ok((program, versions))
}

fn check_program(program: &Program, regions: u64, region_pages: u64) -> Result<(), String> {
    let Program { regions: r, region_pages: p, touched_pages, hot_pages, threads, .. } = *program;
    if (r, p) != (regions, region_pages) {
        return Err(format!("its memory has {r} regions of {p} pages, but here are {regions} of {region_pages}"));
    }
    if touched_pages > p || hot_pages > p || threads == 0 || threads > 256 {
        return Err(format!(
            "its program is impossible: {touched_pages} pages touched, {hot_pages} hot, {threads} threads"
        ));
    }
    Ok(())
}

fn decode_versions(fields: &mut Fields<'_>, pages: u64) -> Result<Box<[AtomicU32]>, String> {
    let versions: Box<[AtomicU32]> = (0..pages).map(|_| AtomicU32::new(0)).collect();
    let runs = u64::from_le_bytes(fields.take()?);
    let mut next = 0;
    for run in 0..runs {
        let first = u64::from_le_bytes(fields.take()?);
        let count = u64::from(u32::from_le_bytes(fields.take()?));
        if first < next || count == 0 || first.checked_add(count).is_none_or(|end| end > pages) {
            return Err(format!("run {run} of its versions: {count} pages from {first}, of {pages}, after {next}"));
        }
        next = first + count;
        for page in &versions[first as usize..next as usize] {
            match u32::from_le_bytes(fields.take()?) {
                0 => return Err(format!("run {run} of its versions has a page that was never written")),
                version => page.store(version, std::sync::atomic::Ordering::Relaxed),
            }
        }
    }
    Ok(versions)
}

/// What is left to be read.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or("its device state is cut short")?;
        self.0 = rest;
        Ok(taken)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (taken, rest) = self.0.split_first_chunk().ok_or("its device state is cut short")?;
        self.0 = rest;
        Ok(*taken)
    }
}

fn checksum(bytes: &[u8]) -> u64 {
    let word = |chunk: &[u8]| chunk.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    bytes.chunks(8).fold(mix(bytes.len() as u64 + 1), |sum, chunk| mix(sum ^ word(chunk)).wrapping_add(sum))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::{Arc, atomic::Ordering};

    use transship_lines::Shutdown;

    use transship_memory::PageCount;

    use super::*;
    use crate::synthetic::{SyntheticOptions, machine::Buffers, mapping::Ram};

    const PAGES: u64 = 64;

    fn machine() -> Machine {
        let ram: Arc<[Ram]> = [Ram::new("ram0".into(), PageCount::new(PAGES), None).unwrap()].into();
        let options = SyntheticOptions::new("/nowhere", PAGES * 4096);
        let machine = Machine::fill(ram, &options, &Shutdown::new().unwrap()).unwrap();
        let mut buffers = Buffers::new();
        [3, 4, 4, 4, 9, 63].into_iter().for_each(|page| machine.write(page, &mut buffers));
        machine.count_writes(6);
        machine
    }

    #[test]
    fn a_state_comes_back() {
        let machine = machine();
        let state = encode(&machine).unwrap();
        let (program, versions) = decode(&mut state.as_slice(), 1, PAGES).unwrap();
        assert_eq!(program, Program { writes: 6, ..machine.program.clone() });
        let versions: Vec<u32> = versions.iter().map(|v| v.load(Ordering::Relaxed)).collect();
        let mut expected = vec![0; PAGES as usize];
        (expected[3], expected[4], expected[9], expected[63]) = (1, 3, 1, 1);
        assert_eq!(versions, expected);
    }

    #[test]
    fn cut_or_flipped_anywhere_is_refused() {
        let state = encode(&machine()).unwrap();
        for cut in 0..state.len() {
            assert!(decode(&mut &state[..cut], 1, PAGES).is_err(), "cut at {cut}");
            let mut flipped = state.clone();
            flipped[cut] ^= 0x20;
            assert!(decode(&mut flipped.as_slice(), 1, PAGES).is_err(), "flipped at {cut}");
        }
        let longer = [state.as_slice(), &[0]].concat();
        assert!(decode(&mut longer.as_slice(), 1, PAGES).is_err());
    }

    #[test]
    fn fields_are_checked_behind_a_good_checksum() {
        let sealed = |mut content: Vec<u8>| {
            content.extend(checksum(&content).to_le_bytes());
            decode(&mut content.as_slice(), 1, PAGES).unwrap_err()
        };
        let state = encode(&machine()).unwrap();
        let content = &state[..state.len() - 8];
        let with_runs = |runs: &[u8]| {
            let length = u32::from_le_bytes(content[8..12].try_into().unwrap()) as usize;
            sealed([&content[..12 + length], runs].concat())
        };
        assert!(sealed(b"TSSYNTH2".to_vec()).contains("not that of a synthetic"));
        assert!(sealed([MAGIC.as_slice(), &[255; 4]].concat()).contains("cut short"));
        assert!(sealed([content, &[0]].concat()).contains("1 bytes are left"));
        assert!(with_runs(&[255; 8]).contains("cut short"));
        assert!(with_runs(&[&[1, 0, 0, 0, 0, 0, 0, 0][..], &[255; 12]].concat()).contains("run 0"));
        assert!(
            with_runs(&[&[1, 0, 0, 0, 0, 0, 0, 0][..], &[0; 8], &[1, 0, 0, 0], &[0; 4]].concat())
                .contains("never written")
        );
        assert!(decode(&mut state.as_slice(), 1, PAGES + 1).unwrap_err().contains("here are 1 of 65"));
        assert!(decode(&mut state.as_slice(), 2, PAGES / 2).unwrap_err().contains("here are 2 of 32"));
    }
}
