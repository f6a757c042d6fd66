//! From one layout of a snapshot to another, without any guest.
use std::{
    path::Path,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};

use transship_memory::{FileIo, GuestMemory, PAGE, PageCount, PageNumber, PageRange, PageSet};
use transship_secure::{Identities, Recipients};
use transship_wire::qemu::{Block, Configuration, GlobalState, RunState};

use super::{
    DirectIo, FileUri, Format,
    file::{
        descriptors::{self, Passed, Purpose},
        origin::Origin,
        target::Target,
    },
    image::{STATE, opened::Image},
    mapped::store::MappedStore,
    open::{Opened, Snapshot, Stream, check_complete, open},
    read_stream::ReadStream,
    save_image::{self, SaveImage},
    stream_store::StreamStore,
};
use crate::{
    Cancelled, Error, Phase, Progress, Report, RoundReport,
    ending::{cancelled_as, finish},
    guest::DiskFile,
    stream::{
        store::{Counts, FileStore, PageWriter, Store, write_pages},
        whence::wrong,
    },
};

/// Pages that are read at once: 1 MiB.
const READ_PAGES: PageCount = PageCount::new(256);
/// Zero pages that are passed on at once: a stream has a record for each.
const CLEAR_PAGES: PageCount = PageCount::new(1 << 16);

/// What the tail is.
const CHECKED: &str = "device sections that were checked can't be read";

/// Makes a snapshot of another one, or of a stream: in `format`, or else a stream of a mapped-ram file, and a
/// mapped-ram file of anything else. Nothing but the layout changes; what a stream says of a page more than once is in
/// a mapped-ram file as it was said last. `identities`: the keys of an encrypted one; what is made of it is in clear,
/// or, with `encrypt_to`, a stream that is encrypted for these.
///
/// On failure what was at the name of `to` is there as it was.
///
/// # Errors
/// See [`Error`].
pub fn convert(
    from: &FileUri,
    to: &FileUri,
    format: Option<Format>,
    (identities, encrypt_to): (Option<&Identities>, Option<&Recipients>),
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let begin = Instant::now();
    // Before the other is open: what is wrong with a descriptor is looked up by paths.
    let passed = descriptors::take(&to.place, Purpose::Save);
    let result = passed.and_then(|passed| Ok((passed, open(from, DirectIo::Off, identities)?)));
    let result = result.and_then(|(passed, opened)| {
        let format = format.unwrap_or(match opened {
            Opened::Mapped(_) => Format::Stream,
            Opened::Stream(_) | Opened::Image(_) => Format::MappedRam,
        });
        if encrypt_to.is_some() && format != Format::Stream {
            return Err(Error::file(format!("{to}: only a file of the format stream can be encrypted")));
        }
        Conversion { to, passed, format, encrypt_to, progress, report, begin }.run(opened)
    });
    finish(result.map_err(cancelled_as(Cancelled::Conversion)), begin, progress, report)
}

struct Conversion<'a> {
    to: &'a FileUri,
    /// What `to` names, if that was passed.
    passed: Option<Passed>,
    format: Format,
    encrypt_to: Option<&'a Recipients>,
    progress: &'a Arc<Progress>,
    report: &'a mut Report,
    begin: Instant,
}

/// All pages are in the store; this is to follow.
struct Converted {
    store: Arc<dyn FileStore>,
    counts: Counts,
    tail: Vec<u8>,
    /// The tail is to say that the guest ran, which was said elsewhere.
    runs: bool,
}

impl Conversion<'_> {
    fn run(mut self, opened: Opened) -> Result<(), Error> {
        let Converted { store, counts, mut tail, runs } = match opened {
            Opened::Mapped(snapshot) => self.mapped(*snapshot)?,
            Opened::Stream(stream) => self.stream(*stream)?,
            Opened::Image(image) => self.image(*image)?,
        };
        self.progress.set_phase(Phase::Completing);
        if runs && let Some(mut state) = GlobalState::find(&tail, 0).map_err(|_| Error::Bug(CHECKED))? {
            state.patch(&mut tail, RunState::Running);
        }
        let completing = Instant::now();
        let mut file = self.report.file.take().unwrap_or_default();
        store.complete(&tail, &mut file, self.progress)?;
        file.format = self.format.to_string();
        file.sync_ms = completing.elapsed().as_secs_f64() * 1e3;
        self.report.file = Some(file);
        let pages = &mut self.report.pages;
        (pages.normal, pages.zero) = (counts.normal.get(), counts.zero.get());
        self.report.bytes.wire = counts.normal.bytes() + tail.len() as u64;
        self.report.rounds.push(RoundReport {
            number: 1,
            scanned: self.report.bytes.guest / PAGE,
            zero: counts.zero.get(),
            bytes: self.report.bytes.wire,
            ms: self.begin.elapsed().as_secs_f64() * 1e3 - self.report.setup_ms,
            ..RoundReport::default()
        });
        Ok(())
    }

    fn begin(
        &mut self,
        origin: &Origin,
        configuration: &Configuration,
        ram_section: u32,
    ) -> Result<Arc<dyn FileStore>, Error> {
        let image = origin.image.as_deref();
        if self.format.libvirts().is_some() && image.is_none() {
            let why = "it has no definition of a domain, which virsh restore needs and only a save image of libvirt's \
                       has; use another --format";
            return Err(wrong(&origin.name, why));
        }
        // There is no guest whose memory the file could be.
        let mut target = match self.format {
            Format::Raw => Target::create_folder(self.to, DirectIo::Off, STATE)?,
            _ => Target::create_in(self.passed.take(), self.to, DirectIo::Off, &GuestMemory::new(Vec::new()))?,
        };
        self.encrypt_to.iter().try_for_each(|recipients| target.seal(recipients))?;
        if let (Some(encoding), Some(SaveImage { header, definition })) = (self.format.libvirts(), image) {
            save_image::put_before(&mut target, definition, header.ran, encoding)?;
        }
        self.report.setup_ms = self.begin.elapsed().as_secs_f64() * 1e3;
        self.progress.set_phase(Phase::Reading);
        Ok(file_store(target, self.format, configuration, ram_section, FileIo::Auto))
    }

    fn stream(&mut self, stream: Stream) -> Result<Converted, Error> {
        stream.check_whole()?;
        let store = self.begin(&stream.origin, &stream.configuration, stream.ram_section)?;
        if let Some(disks) = stream.origin.image.as_deref().and_then(disks_of) {
            store.disks(disks);
        }
        store.list(&stream.blocks)?;
        let runs = self.must_say_that_it_ran(&stream.origin);
        self.progress.round_total.store(stream.origin.bytes.map_or(0, |bytes| bytes - stream.origin.offset), Relaxed);
        let ReadStream { counts, guest_bytes, tail, .. } =
            stream.read_into(Arc::clone(&store) as Arc<dyn Store>, self.progress, Error::CANCELLED)?;
        self.report.bytes.guest = guest_bytes;
        Ok(Converted { store, counts, tail, runs })
    }

    /// Its pages are read once to see that they are those that it was made of: what is made of it has no checksums.
    fn image(&mut self, image: Image) -> Result<Converted, Error> {
        image.check_bytes(self.progress)?;
        let sources = image.sources()?;
        let elsewhere = |block| sources.get(&block).map(|(set, origin)| (set, origin));
        let converted = self.blocks(image.snapshot, &elsewhere)?;
        if let Some(disks) = image.manifest.disks {
            converted.store.disks(disks);
        }
        Ok(converted)
    }

    fn mapped(&mut self, snapshot: Snapshot) -> Result<Converted, Error> {
        check_complete(&snapshot)?;
        self.blocks(snapshot, &|_| None)
    }

    /// All blocks of a snapshot. `elsewhere`: those whose pages are not in it, by their numbers.
    fn blocks(&mut self, snapshot: Snapshot, elsewhere: &Elsewhere<'_>) -> Result<Converted, Error> {
        let store = self.begin(&snapshot.origin, &snapshot.configuration, snapshot.ram_section)?;
        let unplaced = snapshot.blocks.iter().map(|block| Block { mapped: None, ..block.clone() });
        store.list(&unplaced.collect::<Vec<_>>())?;
        if !snapshot.early.is_empty() {
            store.early(&snapshot.early)?;
        }
        self.report.bytes.guest = snapshot.blocks.iter().map(|block| block.used_bytes).sum();
        self.progress.round_total.store(self.report.bytes.guest, Relaxed);
        self.progress.round_left.store(self.report.bytes.guest, Relaxed);
        let (mut counts, mut writer) = (Counts::default(), Arc::clone(&store).writer()?);
        for (number, block) in snapshot.blocks.iter().enumerate() {
            match elsewhere(number) {
                Some((stored, origin)) => {
                    let runs = |take: &mut Take<'_>| stored.ranges().try_for_each(take);
                    let from = From { origin, pages_offset: 0, runs: &runs };
                    self.block(&from, number, block, writer.as_mut(), &mut counts)?;
                }
                None => {
                    let Some(geometry) = block.geometry() else { continue };
                    let runs = |take: &mut Take<'_>| snapshot.each_stored(block, take);
                    let from = From { origin: &snapshot.origin, pages_offset: geometry.pages_offset, runs: &runs };
                    self.block(&from, number, block, writer.as_mut(), &mut counts)?;
                }
            }
        }
        writer.finish()?;
        if snapshot.switchover {
            store.switchover();
        }
        store.last();
        let runs = self.must_say_that_it_ran(&snapshot.origin);
        Ok(Converted { store, counts, tail: snapshot.tail, runs })
    }

    /// libvirt stops a domain before it saves it, and says in its own header whether it ran.
    fn must_say_that_it_ran(&self, origin: &Origin) -> bool {
        self.format.libvirts().is_none() && origin.ran(false)
    }

    fn block(
        &self,
        from: &From<'_>,
        number: usize,
        block: &Block,
        writer: &mut dyn PageWriter,
        counts: &mut Counts,
    ) -> Result<(), Error> {
        let (what, mut done) = (format!("pages of {:?}", &*block.name), PageNumber::FIRST);
        let clear = |writer: &mut dyn PageWriter, gap: PageRange, counts: &mut Counts| {
            counts.zero += gap.count;
            gap.parts(CLEAR_PAGES).try_for_each(|part| {
                self.check_cancelled()?;
                writer.clear(number, part)
            })
        };
        (from.runs)(&mut |run| {
            clear(writer, done.to(run.first), counts)?;
            done = run.end();
            for part in run.parts(READ_PAGES) {
                self.check_cancelled()?;
                let room = writer.room(part.count.index())?;
                from.origin.read_exact(&what, room, from.pages_offset + part.first.offset())?;
                let offsets: Vec<u64> = part.iter().map(PageNumber::offset).collect();
                let written = write_pages(writer, number, &offsets)?;
                counts.normal += written.normal;
                counts.zero += written.zero;
                self.progress.normal_pages.fetch_add(written.normal.get(), Relaxed);
                self.progress.wire_bytes.fetch_add(part.bytes(), Relaxed);
            }
            let _ = self.progress.round_left.fetch_update(Relaxed, Relaxed, |left| {
                let all = block.used_bytes.saturating_sub(done.offset());
                Some(left.saturating_sub(run.bytes()).max(all.min(left)))
            });
            Ok(())
        })?;
        clear(writer, done.to(PageRange::all(PageCount::new(block.pages())).end()), counts)
    }

    fn check_cancelled(&self) -> Result<(), Error> {
        match self.progress.is_cancelled() {
            true => Err(Error::CANCELLED),
            false => Ok(()),
        }
    }
}

/// Hands a run of pages on.
type Take<'a> = dyn FnMut(PageRange) -> Result<(), Error> + 'a;
/// The pages of a block that are in another file, and that file.
type Elsewhere<'a> = dyn Fn(usize) -> Option<(&'a PageSet, &'a Origin)> + 'a;

/// Where the pages of a block are.
struct From<'a> {
    origin: &'a Origin,
    pages_offset: u64,
    /// Hands on those that are there, ascending.
    runs: &'a dyn Fn(&mut Take<'_>) -> Result<(), Error>,
}

/// The disks that libvirt's definition of the domain names, as far as they are here; none if it does not name all.
fn disks_of(image: &SaveImage) -> Option<Vec<DiskFile>> {
    let paths = image.definition.disk_paths()?;
    Some(paths.iter().filter_map(|path| DiskFile::at(path, Path::new(path))).collect())
}

/// The store for a snapshot of this layout. `io`: how the kernel is asked to write pages at fixed places.
pub(crate) fn file_store(
    target: Target,
    format: Format,
    configuration: &Configuration,
    ram_section: u32,
    io: FileIo,
) -> Arc<dyn FileStore> {
    match format {
        Format::MappedRam | Format::LibvirtSparse => {
            Arc::new(MappedStore::begin(target, configuration, ram_section, io))
        }
        Format::Raw => Arc::new(MappedStore::begin_image(target, configuration, ram_section, io)),
        Format::Stream | Format::Libvirt => Arc::new(StreamStore::begin(target, configuration, ram_section)),
    }
}
