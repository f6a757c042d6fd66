//! The regions of a guest as a file names them.
use transship_wire::qemu::Name;

use crate::{
    Error,
    guest::{SourceGuest, StateFormat},
};

/// A region of the guest as the file names it.
#[derive(Debug, Clone)]
pub(crate) struct RegionBlock {
    pub(crate) name: Name,
    pub(crate) bytes: u64,
}

/// The regions of a guest by the names of their RAM blocks.
///
/// # Errors
/// A name that no file can hold.
pub(crate) fn region_blocks(guest: &dyn SourceGuest) -> Result<Vec<RegionBlock>, Error> {
    let memory = guest.memory();
    let names: Vec<String> = match guest.state_format() {
        StateFormat::Qemu { blocks, .. } => blocks,
        StateFormat::Opaque => memory.regions().iter().map(|region| region.name().to_owned()).collect(),
    };
    let blocks = names.iter().zip(memory.regions()).map(|(name, region)| {
        let unfit = |error| Error::unfit(format!("can't save region {:?}: {error}", region.name()));
        Ok(RegionBlock { name: Name::new(name).map_err(unfit)?, bytes: region.bytes() })
    });
    blocks.collect()
}
