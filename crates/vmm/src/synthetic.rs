//! VMMs that hand their guest over by themselves.
