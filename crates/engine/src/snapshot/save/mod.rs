//! The life of a save, from the empty file to the one that is complete.
//!
//! - `output`: what is done with its pages: `mapped`, with the threads that write in `writer`; `stream`, to which the
//!   threads of a background save append (`appended`)
//! - `definition`: what libvirt wants before it
//! - `live`: rounds of a guest that runs
//! - `background`: a save while the guest runs on; `moment`: the memory that it saves, region by region in `unsaved`
mod appended;
mod background;
mod definition;
mod live;
mod mapped;
mod moment;
mod output;
mod stream;
mod unsaved;
mod writer;

use std::{sync::Arc, time::Instant};

use transship_memory::Freeing;
use transship_wire::{libvirt::Definition, qemu::Configuration};

use super::{
    DirectIo, Format, SaveOptions, Then, Way,
    file::{target::Target, uri::FileUri},
    image::STATE,
};
use crate::{
    Cancelled, Error, FileReport, Phase, Progress, Report,
    at_stop::AtStop,
    ending::{cancelled_as, finish, take_back},
    fail_point,
    guarded::Guarded,
    guest::{DiskFile, DiskSnapshot, Found, Guard, GuestError, SourceGuest},
    opened::all_is_open,
    stream::{
        regions::{RegionBlock, region_blocks},
        state::{DeviceState, machine_name},
    },
    unplug::unplug,
};
use live::Rounds;
use mapped::MappedFile;
use output::Output;
use stream::StreamFile;

/// Saves the guest's memory and device state to a file that a stock QEMU loads. `guard`: who puts the guest back as it
/// was should this process die while it is not; none: nobody.
///
/// On success the file is complete and on the disk, and the guest runs on, or stands still if it did before or was to.
/// On every failure but [`Error::Unknown`] it runs on (or stands, if it stood before), what was at the file's name
/// before is there as it was, and nothing else is left. The report is filled as far as it got, also on failure.
///
/// # Errors
/// See [`Error`].
pub fn save_guest(
    guest: &mut dyn SourceGuest,
    guard: Option<&mut dyn Guard>,
    to: &FileUri,
    options: &SaveOptions,
    progress: &Arc<Progress>,
    report: &mut Report,
) -> Result<(), Error> {
    let begin = Instant::now();
    if options.encrypt_to.is_some() && options.format != Format::Stream {
        return Err(Error::file(format!("{to}: only a file of the format stream can be encrypted")));
    }
    report.bytes.guest = guest.memory().bytes();
    let guest = &mut Guarded::new(guest, guard);
    let target = match options.format {
        Format::Raw => Target::create_folder(to, options.direct_io, STATE),
        // A stream's pages have no places that a disk could take.
        format if format.is_sequential() => Target::create(to, DirectIo::Off, &guest.memory()),
        _ => Target::create(to, options.direct_io, &guest.memory()),
    };
    let result = target.and_then(|mut target| {
        options.encrypt_to.iter().try_for_each(|recipients| target.seal(recipients))?;
        if let Some(bandwidth) = options.bandwidth {
            target.pace.limit(bandwidth);
        }
        fail_point::reach("save.created")?;
        let of_image = match options.format {
            Format::Raw => guest.unguarded().disks()?,
            _ => None,
        };
        all_is_open()?;
        let (definition, found) = (None, Found::Standing);
        let (at_stop, disks) = (AtStop::new(&options.at_stop), Vec::new());
        let (guest, target) = (&mut *guest, &mut target);
        let mut saving =
            Saving { guest, options, target, progress, report, of_image, definition, found, at_stop, disks, begin };
        saving.run().inspect_err(|_| saving.at_stop.back())
    });
    guest.plug_back();
    finish(result.map_err(cancelled_as(Cancelled::Look)), begin, progress, report)
}

pub(super) struct Saving<'a, 'g> {
    pub(super) guest: &'a mut Guarded<'g>,
    pub(super) options: &'a SaveOptions,
    pub(super) target: &'a mut Target,
    pub(super) progress: &'a Arc<Progress>,
    pub(super) report: &'a mut Report,
    /// What an image says of the guest's disks.
    of_image: Option<Vec<DiskFile>>,
    /// Of a save image of libvirt's.
    definition: Option<Definition>,
    /// How it was when it was stopped.
    found: Found,
    at_stop: AtStop,
    /// To be taken at the stop.
    disks: Vec<DiskSnapshot>,
    begin: Instant,
}

impl Saving<'_, '_> {
    /// The phases. Whatever fails while the guest stands still, it is resumed in the one place that handles it.
    fn run(&mut self) -> Result<(), Error> {
        self.guest.unguarded().check_going_on()?;
        let ran = self.guest.unguarded().is_running()?;
        let regions = region_blocks(&**self.guest)?;
        self.put_definition(ran)?;
        if let Some(place) = &self.options.disks {
            self.disks = self.guest.unguarded().plan_disks(place.folder())?;
        }
        if self.options.way == Way::Background {
            self.check_background()?;
        }
        if ran && self.options.way != Way::Live {
            unplug(self.guest, &|| self.progress.is_cancelled())?;
            fail_point::reach("save.unplugged")?;
        }
        if ran && self.options.way == Way::Background {
            return self.in_background(&regions);
        }
        let is_live = ran && self.options.way == Way::Live;
        let mut output = self.begin_output(&regions, !is_live)?;
        let output = output.as_mut();
        self.describe_file(output);
        // Ending the tracking takes time that grows with the memory; nobody waits for it when the guest runs again.
        let mut rounds = None;
        if is_live {
            let rounds = rounds.insert(Rounds::begin(self.guest.unguarded(), self.options.converge, self.progress)?);
            fail_point::reach("save.tracking")?;
            self.begin_rounds();
            let options = self.options;
            rounds.until_the_rest_is_small(self.guest, options, output, self.target, self.progress, self.report)?;
        }
        self.progress.set_phase(Phase::Switchover);
        let taken = self.stop_and_take(&mut rounds, output, &regions);
        self.complete_and_resume(taken, output)
    }

    fn begin_output(&mut self, regions: &[RegionBlock], stands_still: bool) -> Result<Box<dyn Output>, Error> {
        let memory = self.guest.memory();
        let freeing = match self.options.way {
            Way::Live => self.guest.freeing(),
            _ => Freeing::Never, // it stands still
        };
        Ok(match self.options.format {
            Format::MappedRam | Format::Raw | Format::LibvirtSparse => {
                let (options, target) = (self.options, &*self.target);
                let mut file =
                    MappedFile::begin(&memory, freeing, regions, options, stands_still, target, self.progress)?;
                file.disks = self.of_image.take();
                Box::new(file)
            }
            Format::Stream | Format::Libvirt => {
                let configuration = Configuration::new(machine_name(&**self.guest)?);
                Box::new(StreamFile::begin(&memory, freeing, regions, configuration, self.target, self.progress)?)
            }
        })
    }

    pub(super) fn describe_file(&mut self, output: &dyn Output) {
        self.report.file = Some(FileReport {
            format: self.options.format.to_string(),
            direct_io: self.target.is_direct(),
            direct_io_refused: self.target.refused().map(str::to_owned),
            io_uring: output.is_uring(),
            ..FileReport::default()
        });
    }

    pub(super) fn begin_rounds(&mut self) {
        self.report.setup_ms = self.begin.elapsed().as_secs_f64() * 1e3;
        self.progress.set_phase(Phase::Rounds);
    }

    /// Everything for which the guest has to stand still.
    fn stop_and_take(
        &mut self,
        rounds: &mut Option<Rounds>,
        output: &mut dyn Output,
        regions: &[RegionBlock],
    ) -> Result<(DeviceState, Found), Error> {
        let guest = self.guest.unguarded();
        let asked = rounds.as_mut().map_or(Ok(()), |rounds| rounds.ask_what_it_gave_back(guest));
        let found = asked.and_then(|()| self.guest.stop().map_err(Error::from));
        rounds.iter_mut().for_each(Rounds::let_writers_go);
        let found = found?;
        self.found = found;
        self.target.pace.end();
        fail_point::reach("save.stopped")?;
        let tracks = rounds.is_some();
        let rounds = match rounds {
            Some(rounds) => {
                rounds.scan_again(output, self.report)?;
                if self.guest.state_ends_writers() {
                    rounds.let_others_end();
                }
                rounds
            }
            None => {
                self.begin_rounds();
                rounds.insert(Rounds::standing_still(&**self.guest)?)
            }
        };
        rounds.write_pending(output, self.target, false, self.progress, self.report)?;
        fail_point::reach("save.last-round")?;
        if !found.ran() || self.options.then == Then::StayStopped {
            self.guest.unguarded().keep_stopped();
        }
        self.guest.unguarded().stays_here();
        let state = DeviceState::take(self.guest.unguarded(), regions, found)?;
        fail_point::reach("save.state")?;
        if tracks {
            self.write_the_late(rounds, output)?;
        }
        self.end_of_stop()?;
        Ok((state, found))
    }

    /// All else is done for which the guest stands still. The snapshot of its disks comes last: what fails before it
    /// leaves them as they are.
    pub(super) fn end_of_stop(&mut self) -> Result<(), Error> {
        self.at_stop.stopped(self.progress, self.report)?;
        if self.disks.is_empty() {
            return Ok(());
        }
        let begin = Instant::now();
        self.guest.unguarded().snapshot_disks()?;
        self.report.disks_ms = Some(begin.elapsed().as_secs_f64() * 1e3);
        self.report.disks = std::mem::take(&mut self.disks);
        fail_point::reach("save.disks")
    }

    /// It failed while the guest stands still: that goes on here.
    pub(super) fn take_back(&mut self, error: Error) -> Error {
        self.at_stop.back();
        take_back(self.guest, error)
    }

    /// Nobody should have written since the last round; what somebody has written goes into the file as well, and is
    /// counted.
    fn write_the_late(&mut self, rounds: &mut Rounds, output: &mut dyn Output) -> Result<(), Error> {
        let late = rounds.scan_once_more(output)?;
        if !late.is_zero() {
            self.report.late_pages += late.get();
            rounds.write_pending(output, self.target, false, self.progress, self.report)?;
        }
        Ok(())
    }

    /// The end: a guest that was saved live runs on before its file is complete, as nothing more is read from it; any
    /// other one when it is.
    fn complete_and_resume(
        &mut self,
        taken: Result<(DeviceState, Found), Error>,
        output: &mut dyn Output,
    ) -> Result<(), Error> {
        let (state, found) = taken.map_err(|error| self.take_back(error))?;
        let downtime_ms = |guest: &Guarded<'_>| if found.ran() { guest.stood_ms() } else { 0.0 };
        if self.options.way == Way::Live && self.options.then == Then::Resume {
            let resumed = self.guest.resume(true);
            self.report.downtime_ms = downtime_ms(self.guest);
            // If it stands still now, its file is worth all the more.
            let completed = fail_point::reach("save.resumed").and_then(|()| self.complete(&state, output));
            return match resumed {
                Ok(()) => completed,
                Err(error) => Err(self.stands_still(error, completed)),
            };
        }
        self.complete(&state, output).map_err(|error| self.take_back(error))?;
        let resumed = self.guest.resume(self.options.then == Then::Resume);
        self.report.downtime_ms = downtime_ms(self.guest);
        resumed.map_err(|error| self.stands_still(error, Ok(())))
    }

    pub(super) fn stands_still(&self, error: GuestError, completed: Result<(), Error>) -> Error {
        let file = match completed {
            Ok(()) => "its snapshot is complete".to_owned(),
            Err(error) => format!("its snapshot failed ({error})"),
        };
        Error::unknown(error, |error| {
            format!(
                "{file}, but the guest can't be resumed: {error}. It is stopped and whole: resume it with: {}",
                self.guest.resume_hint()
            )
        })
    }

    /// Writes everything that is no page of the guest, and makes the file whole.
    pub(super) fn complete(&mut self, state: &DeviceState, output: &mut dyn Output) -> Result<(), Error> {
        self.progress.set_phase(Phase::Completing);
        self.settle_definition()?;
        let begin = Instant::now();
        let file = self.report.file.get_or_insert_default();
        output.complete(state, self.target, file, self.progress)?;
        (file.bytes, file.allocated) = self.target.size()?;
        file.sync_ms = begin.elapsed().as_secs_f64() * 1e3;
        self.report.bytes.wire += state.bytes();
        fail_point::reach("save.done")
    }
}
