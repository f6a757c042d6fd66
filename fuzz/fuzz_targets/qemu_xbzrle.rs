//! A page as a difference, from anybody: it is applied within the page, or refused.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transship_wire::qemu::xbzrle;

fuzz_target!(|bytes: &[u8]| {
    let mut page = [0x55; 4096];
    if xbzrle::decode(bytes, 0, &mut page).is_ok() {
        // Applied again it changes nothing: it says what is new, not what to add.
        let once = page;
        assert_eq!(xbzrle::decode(bytes, 0, &mut page), Ok(()));
        assert!(page == once);
    }
});
