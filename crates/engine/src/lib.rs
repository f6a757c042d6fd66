//! Moves a guest: the source's rounds, channels, convergence and switchover, and the destination's counterpart.
//! It knows a guest only by the traits of `transship-guest`, which are [`guest`] here.
#![forbid(unsafe_code)]

mod at_stop;
mod channels;
mod charge;
mod commands;
mod control;
mod converging;
mod cpu;
mod destination;
mod digest;
mod door;
mod ending;
mod error;
mod error_kind;
mod fail_point;
mod filling;
mod forecast;
mod free;
mod guarded;
mod hand_over;
mod hold;
mod intake;
mod moving;
mod opened;
mod options;
mod owed;
mod pacer;
mod pacing;
mod page_map;
mod plan;
mod progress;
mod qemu_peer;
mod report;
mod rounds;
mod scan;
mod shortfall;
mod snapshot;
mod source;
mod stream;
mod transport;
mod unplug;

/// What a page is on the wire is what it is in memory, and a packet's pages are those of a window; neither crate knows
/// of the other. Numbers are bare in the wire's types: they become pages where the engine takes them.
const _: () = assert!(transship_wire::PAGE_BYTES == transship_memory::PAGE_BYTES);
const _: () = assert!(transship_wire::PAGES_PER_PACKET == transship_memory::WINDOW_PAGES.get());

pub use at_stop::AtStopCommand;
pub use charge::Charge;
pub use commands::{Started, UserCommand, start_by};
pub use destination::{Given, Received, Taken, receive_guest};
pub use error::{Actor, Cancelled, DescriptorFault, Error, Misfit, Outcome, Rule, Unknown};
pub use filling::stand_in::{Ending, StandIn};
pub use hold::HoldOptions;
pub use opened::when_opened;
pub use options::{Compress, Converge, MoveOptions, MoveTerms, PostCopyAfter, Setting, WhenBusy, ZeroPages};
pub use plan::{
    Carrier, CodecSample, GuestSample, LinkSpeed, Outlook, Work, Written, predict, predict_post_copy, probe,
    sample_guest,
};
pub use progress::{CpuProgress, CpuTime, EncodingProgress, Held, Phase, Progress};
pub use qemu_peer::{
    FileSink, FileSinkOptions, QemuSendOptions, RelayOptions, Relayed, Sink, receive_from_qemu, relay_from_qemu,
    relay_many, relay_to_qemu, send_to_qemu,
};
pub use report::{
    ByteCounts, CloneMemory, CloneReport, CpuSeconds, Drains, FileReport, ForecastReport, HoldReport, LazyReport,
    MethodBytes, PageCounts, PostCopyReport, RelayReport, ReleasedBy, Report, RoundReport, Status, TrackerName,
    TrackerReport,
};
pub use shortfall::{Medium, Reached, Shortfall, TooLate};
pub use snapshot::{
    BlockInfo, CloneSource, DirectIo, DisksInfo, FileIo, FilePlace, FileUri, Format, LibvirtInfo, OverlayPlace,
    RestoreOptions, SaveOptions, SectionInfo, SnapshotInfo, TakeOver, Then, Way, arguments, clone_guest, convert,
    inspect, restore_guest, save_guest,
};
pub use source::{HandedOver, Serving, move_guest};
pub use transport::{Listener, Uri, connect, connect_by};
pub use transship_guest as guest;
pub use transship_secure::{
    Caller, Certificates, Host, Identities, KeyTextError, PeerName, Pem, Piece, Recipients,
    SecureError as TrustFailure, Token, TokenError, Unusable, Usage,
};
