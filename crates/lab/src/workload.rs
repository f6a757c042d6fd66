//! What the programs in guest/ are asked to do, and the lines by which they say how they are.

/// What the guest does with its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Memory that it fills and checks, in MiB.
    pub mib: u32,
    /// Pages written a second; 0: as fast as possible.
    pub rate: u32,
    /// MiB that are written again and again; none: all.
    pub hot_mib: Option<u32>,
    /// Write nothing after the first fill.
    pub idle: bool,
    /// Time between two checks of everything.
    pub sweep_ms: u32,
}

impl Workload {
    /// For the Linux guest: 64 MiB, all of it written every eight seconds.
    pub const LINUX: Self = Self { mib: 64, rate: 2000, hot_mib: None, idle: false, sweep_ms: 2000 };
    /// For the 32-bit guest: so little that it also works where KVM has to emulate it. There a sweep takes a core for a
    /// third of a second, so it is done when it is asked for.
    pub const MULTIBOOT: Self = Self { mib: 4, rate: 200, hot_mib: None, idle: false, sweep_ms: 3_600_000 };

    /// As arguments of the kernel.
    pub fn arguments(&self) -> String {
        let Self { mib, rate, idle, sweep_ms, hot_mib } = *self;
        let hot = hot_mib.map(|hot| format!(" workload.hot={hot}")).unwrap_or_default();
        let idle = u32::from(idle);
        format!("workload.mib={mib} workload.rate={rate} workload.idle={idle} workload.sweep_ms={sweep_ms}{hot}")
    }
}

/// `workload: count=N checked=M errors=E uptime=S`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// Pages written since the start.
    pub count: u64,
    /// Pages checked since the start.
    pub checked: u64,
    /// Pages that were not what was written last.
    pub errors: u64,
}

/// `workload: sweep=K pages=P errors=E`, and `asked` behind it if it was asked for: every page has been checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sweep {
    /// How many times by now.
    pub sweep: u64,
    /// Pages checked this time.
    pub pages: u64,
    /// Pages that were not what was written last, since the start.
    pub errors: u64,
}

impl Count {
    /// From a line of the guest.
    pub fn read(line: &str) -> Option<Self> {
        Some(Self { count: field(line, "count")?, checked: field(line, "checked")?, errors: field(line, "errors")? })
    }
}

impl Sweep {
    /// From a line of the guest.
    pub fn read(line: &str) -> Option<Self> {
        Some(Self { sweep: field(line, "sweep")?, pages: field(line, "pages")?, errors: field(line, "errors")? })
    }
}

/// The number of pages in `workload: ready pages=P`.
pub fn read_ready(line: &str) -> Option<u64> {
    line.contains("workload: ready").then(|| field(line, "pages"))?
}

/// The MiB in `workload: dropped mib=N`: so much memory was held and given back.
pub(crate) fn read_dropped(line: &str) -> Option<u64> {
    line.strip_prefix("workload: dropped mib=")?.parse().ok()
}

/// Both numbers in `workload: fresh mib=N wrong=W`: so much memory was taken, and so many pages of it were not zero.
pub(crate) fn read_fresh(line: &str) -> Option<(u64, u64)> {
    let (mib, wrong) = line.strip_prefix("workload: fresh mib=")?.split_once(" wrong=")?;
    Some((mib.parse().ok()?, wrong.parse().ok()?))
}

/// The MiB in `workload: old mib=N`: so much free memory was written and given back.
pub fn read_old_data(line: &str) -> Option<u64> {
    line.contains("workload: old").then(|| field(line, "mib"))?
}

/// The number in `workload: units=N`: functions compiled since the start.
pub fn read_units(line: &str) -> Option<u64> {
    field(line, "units")
}

/// The reads in `workload: slots=S reads=N errors=E`: so often was a disk read into memory since the start.
pub(crate) fn read_reads(line: &str) -> Option<u64> {
    field(line, "slots").and(field(line, "reads"))
}

/// The datagrams in `workload: net sent=S received=R errors=E`: so many have come back since the start.
pub(crate) fn read_received(line: &str) -> Option<u64> {
    field(line, "sent").and(field(line, "received"))
}

/// The digits in `workload: random=H`: 16 bytes that the guest's kernel drew.
pub(crate) fn read_random(line: &str) -> Option<String> {
    line.strip_prefix("workload: random=").filter(|digits| digits.len() == 32).map(str::to_owned)
}

/// Is it `workload: at rest`? Then nothing is compiled any more.
pub fn read_rest(line: &str) -> Option<()> {
    line.contains("workload: at rest").then_some(())
}

/// The number behind ` name=` in a line of the workload. The kernel's own output may stand before the line.
fn field(line: &str, name: &str) -> Option<u64> {
    let (_, fields) = line.split_once("workload: ")?;
    fields.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_told_apart() {
        let count = "workload: count=12 checked=34 errors=1 uptime=5";
        let sweep = "[   1.2] kernel: x workload: sweep=3 pages=64 errors=0";
        assert_eq!(Count::read(count), Some(Count { count: 12, checked: 34, errors: 1 }));
        assert_eq!(Sweep::read(count), None);
        assert_eq!(Sweep::read(sweep), Some(Sweep { sweep: 3, pages: 64, errors: 0 }));
        assert_eq!(Count::read(sweep), None);
        assert_eq!(Sweep::read(&format!("{sweep} asked")), Sweep::read(sweep));
        assert_eq!(read_ready("workload: ready pages=7"), Some(7));
        assert_eq!(read_ready(sweep), None);
        assert_eq!(read_old_data("workload: old mib=1700"), Some(1700));
        assert_eq!(read_units("workload: units=31"), Some(31));
        assert_eq!((read_old_data(sweep), read_units(sweep), read_rest(sweep)), (None, None, None));
        assert_eq!(read_rest("workload: at rest"), Some(()));
        let slots = "workload: slots=8192 reads=31 errors=0";
        assert_eq!((read_reads(slots), Sweep::read(slots), Count::read(slots)), (Some(31), None, None));
        assert_eq!(read_reads(sweep), None);
        let net = "workload: net sent=31 received=30 errors=0";
        assert_eq!((read_received(net), Sweep::read(net), Count::read(net)), (Some(30), None, None));
    }

    #[test]
    fn a_line_cut_short_is_no_line() {
        assert_eq!(Count::read("workload: count=12 checked=34 err"), None);
        assert_eq!(Sweep::read("workload: sweep=3 pages=6"), None);
        assert_eq!(read_units("ts=31"), None);
    }
}
