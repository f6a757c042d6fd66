//! Stock QEMU, attached from outside.
