//! QEMU's formats: what is written is read back, for all values; and no bytes at all make a reader do harm.
use std::collections::BTreeMap;

use crate::streams::*;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use transship_wire::qemu::*;
use transship_wire::{Error, PAGE_BYTES};

fn name() -> impl Strategy<Value = Name> {
    prop_oneof!["[a-z0-9./@:_-]{1,40}", "[a-z]{255}", "\\PC{1,40}"]
        .prop_filter_map("no control characters", |text| Name::new(&text).ok())
}

fn configuration() -> impl Strategy<Value = Configuration> {
    (name(), any::<(bool, bool, bool)>(), any::<Option<[u8; 16]>>()).prop_map(
        |(machine, (page_bits, ignore_shared, mapped_ram), uuid)| Configuration {
            machine,
            page_bits,
            ignore_shared,
            mapped_ram,
            uuid,
        },
    )
}

fn command() -> impl Strategy<Value = Command> {
    let discard = (name(), vec(any::<(u64, u64)>(), 0..20))
        .prop_map(|(block, ranges)| Command::PostcopyRamDiscard(RamDiscard { block, ranges }));
    prop_oneof![
        any::<u32>().prop_map(Command::Ping),
        // Pages of the guest's size: with others the list of blocks could not be told.
        any::<u64>().prop_map(|bits| Command::PostcopyAdvise(Some(PageSizes { blocks: bits, guest: bits }))),
        discard,
        name().prop_map(|block| Command::RecvBitmap { block }),
        prop::sample::select(vec![
            Command::OpenReturnPath,
            Command::PostcopyAdvise(None),
            Command::PostcopyListen,
            Command::PostcopyRun,
            Command::EnableColo,
            Command::PostcopyResume,
            Command::SwitchoverStart,
        ]),
    ]
}

/// What a stream is made of, beside what follows from it.
#[derive(Debug, Clone)]
struct Plan {
    base: u64,
    section: u32,
    configuration: Configuration,
    commands: Vec<Command>,
    /// Pages and address of each block; whether the file leaves its pages out.
    blocks: BTreeMap<Name, (u64, u64, bool)>,
    /// Which block, which page of it, and the byte that it is full of.
    pages: Vec<(prop::sample::Index, prop::sample::Index, u8)>,
    package: Vec<u8>,
}

fn plan() -> impl Strategy<Value = Plan> {
    let blocks = btree_map(name(), (1u64..600, any::<u64>(), any::<bool>()), 1..12);
    let pages = vec(any::<(prop::sample::Index, prop::sample::Index, u8)>(), 0..6);
    let package = vec(any::<u8>(), 0..100);
    (0u64..1 << 50, any::<u32>(), configuration(), vec(command(), 0..5), blocks, pages, package).prop_map(
        |(base, section, configuration, commands, blocks, pages, package)| Plan {
            base,
            section,
            configuration,
            commands,
            blocks,
            pages,
            package,
        },
    )
}

/// Writes the plan, and says which records a reader must find.
fn write(plan: &Plan, writer: &mut StreamWriter) -> Vec<String> {
    let Plan { section, configuration, .. } = plan;
    let section = *section;
    let mut records = vec![text(Record::Header), text(Record::Configuration(configuration.clone()))];
    writer.header().configuration(configuration);
    for command in &plan.commands {
        writer.command(command);
        records.push(text(Record::Command(command.clone())));
    }
    let total = plan.blocks.values().map(|(pages, ..)| pages * PAGE_BYTES as u64).sum();
    writer.ram_start(total);
    records.push(text(Record::RamStart { section, total }));
    let blocks: Vec<_> = plan.blocks.iter().map(|(name, fields)| write_block(plan, name, *fields, writer)).collect();
    records.extend(blocks.iter().cloned().map(|block| text(Record::Block(block))));
    writer.end_of_section().part();
    records.extend([Record::EndOfBody, Record::Footer { section }, Record::Part { section }].map(text));
    if !configuration.mapped_ram {
        writer.multifd_flush();
        records.push(text(Record::MultifdFlush));
        records.extend(plan.pages.iter().map(|page| write_page(&blocks, page, writer)));
    }
    let package = Command::Packaged { bytes: plan.package.len() as u32 };
    writer.end_of_section().command(&package).raw(&plan.package).end().end_of_section();
    records.extend([Record::EndOfBody, Record::Footer { section }, Record::Command(package)].map(text));
    records.extend((!plan.package.is_empty()).then(|| text(Record::Raw(&plan.package))));
    let end = [Record::End { section }, Record::EndOfBody, Record::Footer { section }, Record::Tail];
    records.extend(end.map(text));
    records
}

fn write_block(plan: &Plan, name: &Name, (pages, gpa, ignored): (u64, u64, bool), writer: &mut StreamWriter) -> Block {
    let Configuration { ignore_shared, mapped_ram, .. } = plan.configuration;
    let used_bytes = pages * PAGE_BYTES as u64;
    let gpa = ignore_shared.then_some(gpa);
    if mapped_ram && !(ignore_shared && ignored) {
        return writer.mapped_block(name, used_bytes, gpa);
    }
    let block = Block { name: name.clone(), used_bytes, gpa, mapped: mapped_ram.then_some(Mapped::Ignored) };
    writer.block(&block);
    block
}

fn write_page(
    blocks: &[Block],
    (block, page, byte): &(prop::sample::Index, prop::sample::Index, u8),
    writer: &mut StreamWriter,
) -> String {
    let index = block.index(blocks.len());
    let Block { name, .. } = &blocks[index];
    let offset = (page.index(blocks[index].pages() as usize) * PAGE_BYTES) as u64;
    let bytes = [*byte; PAGE_BYTES];
    let content = if *byte == 0 {
        writer.zero_page(name, offset);
        PageContent::Fill(0)
    } else if byte % 16 == 0 {
        writer.xbzrle_page(name, offset, &bytes[..usize::from(*byte)]);
        PageContent::Xbzrle(&bytes[..usize::from(*byte)])
    } else {
        writer.page(name, offset, &bytes);
        PageContent::Normal(&bytes)
    };
    text(Record::Page(Page { block: index, offset, content }))
}

fn text(record: Record<'_>) -> String {
    format!("{record:?}")
}

/// All records of a stream that is in pieces.
fn read_pieces(base: u64, pieces: &[Piece]) -> Vec<String> {
    let mut reader = StreamReader::at(base).within(u64::MAX);
    let mut records = Vec::new();
    loop {
        let at = reader.position();
        let holds = |piece: &&Piece| (piece.position..piece.position + piece.bytes.len() as u64).contains(&at);
        let rest = pieces.iter().find(holds).map_or(&[][..], |piece| &piece.bytes[(at - piece.position) as usize..]);
        match reader.next(rest).unwrap() {
            Step::Done { record, .. } => {
                let last = record == Record::Tail;
                records.push(text(record));
                if last {
                    return records;
                }
            }
            Step::More { .. } => panic!("{}", reader.cut_short(rest)),
        }
    }
}

proptest! {
    #[test]
    fn streams_are_read_as_they_were_written(plan in plan()) {
        let mut writer = StreamWriter::new(plan.base, plan.section);
        let records = write(&plan, &mut writer);
        prop_assert_eq!(read_pieces(plan.base, &writer.take()), records);
    }

    /// At every cut in every record the reader asks for more, and keeps its promise: with what it asked for it goes on.
    #[test]
    fn cut_anywhere_a_stream_asks_for_more(mut plan in plan()) {
        plan.configuration.mapped_ram = false;
        plan.pages.truncate(2);
        let mut writer = StreamWriter::new(plan.base, plan.section);
        write(&plan, &mut writer);
        let bytes = writer.take_bytes();
        let mut reader = StreamReader::at(plan.base);
        loop {
            let rest = &bytes[(reader.position() - plan.base) as usize..];
            let before = reader.clone();
            let Step::Done { record, used } = reader.next(rest).unwrap() else { panic!("the stream is whole") };
            if record == Record::Tail {
                break;
            }
            // Raw bytes come in pieces of any length.
            let cuts = if matches!(record, Record::Raw(_)) { 0..1 } else { 0..used };
            for cut in cuts {
                let mut reader = before.clone();
                let step = reader.next(&rest[..cut]).unwrap();
                let Step::More { at_least } = step else { panic!("{record:?} cut at {cut}") };
                prop_assert!(cut < at_least && at_least <= MAX_RECORD_BYTES);
                // The configuration looks at one byte more than it takes.
                prop_assert!(at_least <= used + usize::from(matches!(record, Record::Configuration(_))));
                let error = reader.cut_short(&rest[..cut]);
                prop_assert!(matches!(error, Error::Truncated { .. }), "{}", error);
                prop_assert_eq!(reader.next(rest).unwrap(), Step::Done { record: record.clone(), used });
            }
        }
    }

    #[test]
    fn damaged_streams_are_read_or_refused(plan in plan(), damage in vec(any::<(prop::sample::Index, u8)>(), 1..4)) {
        let mut writer = StreamWriter::new(plan.base, plan.section);
        write(&plan, &mut writer);
        let mut bytes: Vec<u8> = writer.take().into_iter().flat_map(|piece| piece.bytes).collect();
        for (place, byte) in damage {
            let place = place.index(bytes.len());
            bytes[place] ^= byte;
        }
        let mut reader = StreamReader::at(plan.base);
        let mut at = 0;
        while let Ok(Step::Done { record, used }) = reader.next(&bytes[at..]) {
            if record == Record::Tail {
                break;
            }
            at += used;
            let total: u64 = reader.blocks().iter().map(|block| block.used_bytes).sum();
            prop_assert!(total < 1 << 57);
            if let Record::Page(page) = record {
                prop_assert!(page.offset < reader.blocks()[page.block].used_bytes);
            }
        }
    }

    #[test]
    fn stock_places_never_overlap(header_end in 0u64..1 << 60, pages in 1u64..1 << 40) {
        let used_bytes = pages * PAGE_BYTES as u64;
        let geometry = Geometry::stock(header_end, used_bytes);
        let (bitmap, place) = (geometry.bitmap(used_bytes), geometry.pages(used_bytes));
        prop_assert_eq!(bitmap.start, header_end);
        prop_assert!(8 * (bitmap.end - bitmap.start) >= pages && (bitmap.end - bitmap.start) % 8 == 0);
        prop_assert!(8 * (bitmap.end - bitmap.start) < pages + 64);
        prop_assert!(bitmap.end <= place.start && place.start - bitmap.end < PAGES_ALIGNMENT);
        prop_assert_eq!((place.start % PAGES_ALIGNMENT, place.end - place.start), (0, used_bytes));
    }
}

/// Sections with a random state, and the JSON that describes them.
fn sections() -> impl Strategy<Value = Vec<(Name, u32, u32, Vec<u8>, usize)>> {
    let body = vec(any::<u8>(), 0..300);
    vec((name(), any::<u32>(), any::<u32>(), body, 0usize..300), 0..8).prop_map(|mut sections| {
        sections.iter_mut().for_each(|(.., body, first)| *first = (*first).min(body.len()));
        sections
    })
}

fn write_tail(sections: &[(Name, u32, u32, Vec<u8>, usize)]) -> Vec<u8> {
    let mut writer = StreamWriter::new(0, 0);
    for (number, (name, instance, version, body, _)) in sections.iter().enumerate() {
        writer.full(number as u32, name, *instance, *version, body);
    }
    let fields = |(.., body, first): &(Name, u32, u32, Vec<u8>, usize)| {
        [("first", "buffer", *first as u64), ("second", "buffer", (body.len() - first) as u64)]
    };
    let fields: Vec<_> = sections.iter().map(fields).collect();
    let described: Vec<_> = sections
        .iter()
        .zip(&fields)
        .map(|((name, instance, version, ..), fields)| Described {
            name,
            instance: *instance,
            version: *version,
            fields,
        })
        .collect();
    writer.eof().vmdesc(&describe(&described));
    writer.take_bytes()
}

proptest! {
    #[test]
    fn tails_are_read_as_they_were_written(
        sections in sections(),
        base in 0u64..1 << 50,
        behind in vec(any::<u8>(), 0..30),
    ) {
        let mut bytes = write_tail(&sections);
        let end = bytes.len();
        bytes.extend(behind);
        let tail = Tail::parse(&bytes, base).unwrap();
        prop_assert_eq!(tail.end, end);
        prop_assert!(tail.is_walked());
        prop_assert_eq!(tail.sections.len(), sections.len());
        for (number, (read, written)) in tail.sections.iter().zip(&sections).enumerate() {
            let (name, instance, version, body, _) = written;
            prop_assert_eq!((&read.name, read.instance, read.version), (name, *instance, *version));
            prop_assert_eq!(read.section, number as u32);
            prop_assert_eq!(&bytes[read.body.clone()], &body[..]);
            prop_assert_eq!(read.offset + 14 + name.len() as u64, base + read.body.start as u64);
        }
    }

    #[test]
    fn damaged_tails_are_read_or_refused(
        sections in sections(),
        damage in vec(any::<(prop::sample::Index, u8)>(), 0..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = write_tail(&sections);
        for (place, byte) in damage {
            let place = place.index(bytes.len());
            bytes[place] ^= byte;
        }
        bytes.truncate(cut.index(bytes.len() + 1));
        if let Ok(tail) = Tail::parse(&bytes, 0) {
            prop_assert!(tail.end <= bytes.len());
            prop_assert!(tail.sections.iter().all(|section| section.body.end <= bytes.len()));
        }
        let _ = GlobalState::find(&bytes, 0);
    }

    #[test]
    fn packets_are_read_as_they_were_written(packet in packet()) {
        let bytes = packet.encode();
        let used = bytes.len();
        prop_assert_eq!(Packet::read(&bytes, 0).unwrap(), Step::Done { record: packet, used });
        for cut in 0..used {
            let Step::More { at_least } = Packet::read(&bytes[..cut], 0).unwrap() else { panic!("cut at {cut}") };
            prop_assert!(cut < at_least && at_least <= used);
        }
    }

    #[test]
    fn damaged_packets_are_read_or_refused(
        packet in packet(),
        damage in vec(any::<(prop::sample::Index, u8)>(), 1..4),
    ) {
        let mut bytes = packet.encode();
        for (place, byte) in damage {
            let place = place.index(bytes.len());
            bytes[place] ^= byte;
        }
        if let Ok(Step::Done { record: Packet::Pages(pages), .. }) = Packet::read(&bytes, 0) {
            prop_assert!(pages.normal().len() + pages.zero().len() <= MAX_PACKET_PAGES);
            prop_assert!(pages.payload_bytes() <= MAX_PAYLOAD_BYTES);
            prop_assert_eq!(pages.normal().is_empty(), pages.payload_bytes() == 0);
            prop_assert!(pages.normal().iter().chain(pages.zero()).all(|offset| offset % 4096 == 0));
        }
    }

    #[test]
    fn greetings_are_read_as_they_were_written(uuid in any::<[u8; 16]>(), channel in 0u8..=254) {
        let greeting = Greeting { uuid, channel };
        prop_assert_eq!(Greeting::decode(&greeting.encode()), Ok(greeting));
    }

    #[test]
    fn replies_are_read_as_they_were_written(reply in reply()) {
        let bytes = reply.encode();
        let used = bytes.len();
        prop_assert_eq!(Reply::read(&bytes, 0).unwrap(), Step::Done { record: reply, used });
        for cut in 0..used {
            let Step::More { at_least } = Reply::read(&bytes[..cut], 0).unwrap() else { panic!("cut at {cut}") };
            prop_assert!(cut < at_least && at_least <= used);
        }
    }

    #[test]
    fn differences_make_the_new_page_of_the_old(old in changes(), new in changes()) {
        let (mut page, new) = (paint(&old, [0; PAGE_BYTES]), paint(&new, paint(&old, [0; PAGE_BYTES])));
        let encoded = xbzrle_encode(&page, &new);
        xbzrle::decode(&encoded, 0, &mut page).unwrap();
        prop_assert!(page == new);
    }

    #[test]
    fn any_difference_stays_in_its_page(encoded in vec(any::<u8>(), 0..600)) {
        let _ = xbzrle::decode(&encoded, 0, &mut [0; PAGE_BYTES]);
    }
}

fn packet() -> impl Strategy<Value = Packet> {
    let offsets = vec((0u64..1 << 44).prop_map(|page| page * PAGE_BYTES as u64), 1..=MAX_PACKET_PAGES);
    let method = vec![Method::None, Method::Zlib, Method::Zstd, Method::Qpl, Method::Uadk, Method::Qatzip];
    let payload = 1..=MAX_PAYLOAD_BYTES;
    let pages = (name(), offsets, any::<prop::sample::Index>(), prop::sample::select(method), payload, any::<u64>());
    let device = (name(), any::<u32>(), 1u32..);
    prop_oneof![
        4 => pages.prop_map(|(block, offsets, normal, method, payload, number)| {
            let (normal, zero) = offsets.split_at(normal.index(offsets.len() + 1));
            Packet::Pages(Pages::new(block, normal, zero, method, payload).numbered(number))
        }),
        1 => any::<u64>().prop_map(|number| Packet::Pages(Pages::barrier().numbered(number))),
        1 => device.prop_map(|(name, instance, payload_bytes)| {
            Packet::DeviceState(DeviceState { name, instance, payload_bytes })
        }),
    ]
}

fn reply() -> impl Strategy<Value = Reply> {
    prop_oneof![
        any::<u32>().prop_map(Reply::Shut),
        any::<u32>().prop_map(Reply::Pong),
        (prop::option::of(name()), any::<u64>(), any::<u32>()).prop_map(|(block, offset, bytes)| Reply::RequestPages {
            block,
            offset,
            bytes
        }),
        (name(), any::<u64>()).prop_map(|(block, bitmap_bytes)| Reply::ReceivedBitmap { block, bitmap_bytes }),
        Just(Reply::ResumeAck),
        Just(Reply::SwitchoverAck),
    ]
}

/// Where a page is changed, for how long, to what.
fn changes() -> impl Strategy<Value = Vec<(usize, usize, u8)>> {
    vec((0..PAGE_BYTES, 1usize..400, any::<u8>()), 0..20)
}

fn paint(changes: &[(usize, usize, u8)], mut page: [u8; PAGE_BYTES]) -> [u8; PAGE_BYTES] {
    for &(start, count, byte) in changes {
        page[start..(start + count).min(PAGE_BYTES)].fill(byte);
    }
    page
}

/// The encoder of section 2.3, as plainly as can be.
fn xbzrle_encode(old: &[u8; PAGE_BYTES], new: &[u8; PAGE_BYTES]) -> Vec<u8> {
    let run = |from: usize, same: bool| (from..PAGE_BYTES).take_while(|&at| (old[at] == new[at]) == same).count();
    let mut encoded = Vec::new();
    let mut at = 0;
    while at < PAGE_BYTES {
        let same = run(at, true);
        let changed = run(at + same, false);
        if changed > 0 {
            for length in [same, changed] {
                let low = (length & 0x7f) as u8;
                if length < 0x80 { encoded.push(low) } else { encoded.extend([low | 0x80, (length >> 7) as u8]) }
            }
            encoded.extend(&new[at + same..at + same + changed]);
        }
        at += same + changed;
    }
    encoded
}

/// A real tail with its trailer, cut at many places: an error each time, for without its end a trailer is none.
#[test]
fn a_real_tail_cut_short() {
    let bytes = sample("plain-10.0.2");
    let reader = read_all(&bytes, StreamReader::new(), |_, _, _| {}).unwrap();
    let tail = &bytes[reader.position() as usize..];
    for cut in (0..200).chain((200..tail.len()).step_by(997)).chain(tail.len() - 200..tail.len()) {
        match Tail::parse(&tail[..cut], reader.position()) {
            Err(Error::Truncated { .. }) => {}
            // Nobody knows where sections without a trailer end, but for the byte that ends them.
            Ok(parsed) => assert!(!parsed.is_walked() && tail[cut - 1] == 0, "cut at {cut}"),
            other => panic!("cut at {cut}: {other:?}"),
        }
    }
}
