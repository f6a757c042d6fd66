//! What a move would be like, before it begins.
//!
//! - `sample`: what is learned of the guest in some seconds, while it runs
//! - `probe`: what the way to a waiting receiver carries
//! - `looks`: what is learned of it while its first round is sent; `first_round`: what is thought of the move then
//! - `model`: the rounds that follow from both, judged by the same forecast that judges those of a move
mod first_round;
mod looks;
mod model;
mod probe;
mod sample;

pub(crate) use first_round::FirstRound;
pub(crate) use looks::Tracked;
pub use model::{Carrier, Outlook, Work, predict, predict_post_copy};
pub use probe::{LinkSpeed, probe};
pub use sample::{CodecSample, GuestSample, Written, sample_guest};
