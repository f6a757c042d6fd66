//! What stands before the stream in a save image of libvirt's: the domain's definition, which has to fit what is saved.
use transship_wire::libvirt::{Definition, DiskFiles};

use super::Saving;
use crate::{Error, snapshot::save_image};

impl Saving<'_, '_> {
    /// Begins the file with it. `ran`: whether the guest runs now.
    ///
    /// # Errors
    /// libvirt does not know the guest; the system's own.
    pub(super) fn put_definition(&mut self, ran: bool) -> Result<(), Error> {
        let Some(encoding) = self.options.format.libvirts() else { return Ok(()) };
        let definition = self.definition_now()?;
        save_image::put_before(self.target, &definition, ran, encoding)?;
        self.definition = Some(definition);
        Ok(())
    }

    /// What was saved fits it only if nobody has plugged or unplugged anything meanwhile. Now it is known, too, whether
    /// the guest ran when it was stopped.
    ///
    /// # Errors
    /// It does not fit any more; libvirt does not say.
    pub(super) fn settle_definition(&mut self) -> Result<(), Error> {
        let (Some(encoding), Some(definition)) = (self.options.format.libvirts(), self.definition.take()) else {
            return Ok(());
        };
        let files = if self.report.disks.is_empty() { DiskFiles::Same } else { DiskFiles::Any };
        if !self.definition_now()?.is_same_machine(&definition, files) {
            let why = "the domain's definition was changed while it was saved (virsh dumpxml shows it); save it again";
            return Err(Error::unfit(why));
        }
        self.target.change_before(definition.encode(self.found.ran(), encoding));
        Ok(())
    }

    fn definition_now(&mut self) -> Result<Definition, Error> {
        self.guest.unguarded().definition()?.ok_or_else(|| {
            let why = "a save image of libvirt's begins with the definition of a domain, which only libvirt knows; \
                       name the guest by --vm libvirt:DOMAIN, or use another --format";
            Error::unfit(why)
        })
    }
}
