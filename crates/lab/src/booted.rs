//! Guests that have booted once for all that are like them.
use crate::{LabError, Qemu, QemuBuilder, Result, Scratch, wait_until};
use serde_json::json;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A guest as it was when it had filled its memory, saved by QEMU.
#[derive(Debug)]
pub(crate) struct Booted {
    _folder: Scratch,
    file: PathBuf,
    pages: u64,
}

/// One that is being made keeps those waiting that want the same, and nobody else.
type Kept = Arc<OnceLock<std::result::Result<Arc<Booted>, String>>>;

impl Booted {
    /// The one of this kind. The first to ask for it boots it.
    ///
    /// # Errors
    /// It does not boot, or can't be saved.
    pub(crate) fn of(builder: &QemuBuilder) -> Result<Arc<Self>> {
        static ALL: OnceLock<Mutex<HashMap<String, Kept>>> = OnceLock::new();
        let kept = {
            let mut all = ALL.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(all.entry(builder.kind_of_guest()).or_default())
        };
        let made = kept.get_or_init(|| Self::make(builder).map(Arc::new).map_err(|error| error.0));
        made.clone().map_err(LabError)
    }

    fn make(builder: &QemuBuilder) -> Result<Self> {
        let folder = Scratch::new()?;
        let file = folder.join("booted");
        let guest = builder.clone().start()?;
        let pages = guest.ready()?;
        guest.qmp("stop", json!({}))?;
        guest.qmp("migrate-set-parameters", json!({ "max-bandwidth": u64::MAX >> 1 }))?;
        set_mapped_ram(&guest, true)?;
        guest.qmp("migrate", json!({ "uri": format!("file:{}", file.display()) }))?;
        wait_until("a guest that has booted to be saved", || {
            let status = guest.qmp("query-migrate", json!({}))?;
            match status["status"].as_str() {
                Some("completed") => Ok(true),
                Some("failed") => Err(LabError(format!("a guest that has booted can't be saved: {status}"))),
                _ => Ok(false),
            }
        })?;
        Ok(Self { _folder: folder, file, pages })
    }

    /// What it has said of itself.
    pub(crate) fn greeting(&self) -> String {
        format!("workload: ready pages={}\n", self.pages)
    }

    /// Lets it go on in a QEMU that waits.
    ///
    /// # Errors
    /// QEMU does not take it.
    pub(crate) fn load_into(&self, guest: &Qemu) -> Result<()> {
        set_mapped_ram(guest, true)?;
        guest.qmp("migrate-incoming", json!({ "uri": format!("file:{}", self.file.display()) }))?;
        wait_until("a guest that has booted to be loaded", || Ok(guest.status()? == "paused"))?;
        set_mapped_ram(guest, false)?;
        guest.qmp("cont", json!({}))?;
        Ok(())
    }
}

/// What was never touched is not touched by loading such a file.
fn set_mapped_ram(guest: &Qemu, on: bool) -> Result<()> {
    let capability = json!({ "capability": "mapped-ram", "state": on });
    guest.qmp("migrate-set-capabilities", json!({ "capabilities": [capability] })).map(drop)
}
