//! The QEMU adapter on real QEMUs: what it refuses, that a guest moves whole, and that QEMU is as before afterwards.
mod lab;
mod moves;
mod refusals;
mod run_again;
mod sandboxed;
mod waiting;
