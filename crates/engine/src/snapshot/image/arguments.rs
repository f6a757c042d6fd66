//! The arguments of a QEMU that is to be a clone.
use std::path::Path;

use super::opened::Image;
use crate::{Error, stream::whence::wrong};

/// How QEMU's older machines call memory backends.
const OBJECTS: &str = "/objects/";

/// What a QEMU needs beside what the guest of the image was started with, to map the image's memory and wait. By these
/// its memory is that of the image, which it can't change. Words, not yet quoted for a shell.
///
/// # Errors
/// There is no image in the folder.
pub fn arguments(folder: &Path) -> Result<Vec<String>, Error> {
    let name = folder.display().to_string();
    let image = Image::open(&name, folder)?;
    let folder = std::path::absolute(&image.folder)
        .map_err(|source| Error::Io { what: format!("find the folder of {name}"), source })?;
    let mut words = Vec::new();
    let mut ids = Vec::new();
    for region in &image.manifest.memory {
        let id = region.region.strip_prefix(OBJECTS).unwrap_or(&region.region);
        let path = folder.join(&region.pinned.file).display().to_string();
        // QEMU reads two commas in a value as one.
        let path = path.replace(',', ",,");
        let bytes = region.pinned.bytes;
        words.push("-object".to_owned());
        words.push(format!("memory-backend-file,id={id},size={bytes},mem-path={path},share=off,readonly=on,rom=off"));
        ids.push(id);
    }
    match ids.as_slice() {
        [] => return Err(wrong(&name, "it has no memory")),
        // More than one are of NUMA nodes or devices, which the user names.
        [id] => words.extend(["-machine".to_owned(), format!("memory-backend={id}")]),
        _ => {}
    }
    words.extend(["-incoming".to_owned(), "defer".to_owned()]);
    Ok(words)
}
