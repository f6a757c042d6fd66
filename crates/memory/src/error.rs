//! What can go wrong with guest memory.

/// An operation on guest memory that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused.
    #[error("{what}: {source}")]
    System { what: String, source: std::io::Error },
    /// Pages that the region does not have.
    #[error("region {region:?}: pages {first}..{end} asked for, it has {pages}")]
    OutOfRange { region: String, first: u64, end: u64, pages: u64 },
    /// Something that can't be used as guest memory.
    #[error("region {region:?}: {why}")]
    Unusable { region: String, why: String },
    /// The kernel lacks something.
    #[error("the kernel can't {what}: {need}")]
    Kernel { what: &'static str, need: &'static str },
}
