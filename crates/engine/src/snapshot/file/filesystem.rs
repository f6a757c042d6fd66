//! What a file system is called, and what it has left: for messages.
use std::{fs, fs::File, os::unix::fs::MetadataExt};

/// `ext4 at /srv`, as good as it can be told.
pub(crate) fn name(file: &File) -> String {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let device = file.metadata().map(|meta| meta.dev()).unwrap_or(0);
    mounted(&mounts, rustix::fs::major(device), rustix::fs::minor(device)).unwrap_or_else(|| "file system".into())
}

/// Bytes that may still be written, where the system says so.
pub(crate) fn available_bytes(file: &File) -> Option<u64> {
    rustix::fs::fstatvfs(file).ok().map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// The last line of a mountinfo for a device: what is mounted last covers what was there.
fn mounted(mounts: &str, major: u32, minor: u32) -> Option<String> {
    let device = format!("{major}:{minor}");
    mounts.lines().rev().find_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(2);
        let place = (fields.next()? == device).then(|| fields.nth(1))??;
        Some(format!("{} at {place}", system.split(' ').next()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_is_found_by_its_device() {
        let mounts = "22 1 254:0 / / rw - ext4 /dev/root rw\n\
                      30 22 0:25 /sub /dev/shm rw,nosuid shared:3 master:1 - tmpfs tmpfs rw\n";
        assert_eq!(mounted(mounts, 254, 0).as_deref(), Some("ext4 at /"));
        assert_eq!(mounted(mounts, 0, 25).as_deref(), Some("tmpfs at /dev/shm"));
        assert_eq!(mounted(mounts, 9, 9), None);
        assert_eq!(mounted("garbage\n1 2 9:9 - \n", 9, 9), None);
    }
}
