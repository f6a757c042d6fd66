//! The functions of `shim.c`.

/// `struct ts_deflater`, opaque.
#[repr(C)]
pub(crate) struct Deflater {
    _opaque: [u8; 0],
}

/// `struct inflate_state`, opaque.
#[repr(C)]
pub(crate) struct Inflater {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    pub(crate) fn ts_deflater_new(level: u32) -> *mut Deflater;
    pub(crate) fn ts_deflater_free(deflater: *mut Deflater);
    pub(crate) fn ts_deflate(
        deflater: *mut Deflater,
        input: *const u8,
        input_len: u32,
        out: *mut u8,
        out_len: u32,
        finish: i32,
    ) -> i64;

    pub(crate) fn ts_inflater_new() -> *mut Inflater;
    pub(crate) fn ts_inflater_free(inflater: *mut Inflater);
    pub(crate) fn ts_inflater_reset(inflater: *mut Inflater);
    pub(crate) fn ts_inflate(
        inflater: *mut Inflater,
        input: *const u8,
        input_len: u32,
        out: *mut u8,
        out_len: u32,
        input_left: *mut u32,
        made: *mut u32,
    ) -> i32;
    pub(crate) fn ts_inflater_place(inflater: *const Inflater) -> i32;

    pub(crate) fn ts_crc32(seed: u32, input: *const u8, len: u64) -> u32;
}
