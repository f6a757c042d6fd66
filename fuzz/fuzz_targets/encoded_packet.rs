//! An encoded packet from anybody, then another on the same channel: each fills the pages or is refused. The first byte
//! says which decoder and how many pages.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transship_codec::Method;

const PAGE: usize = 4096;

fuzz_target!(|bytes: &[u8]| {
    let Some((&choice, encoded)) = bytes.split_first() else { return };
    let Some(method) = Method::from_number(choice & 7) else { return };
    let mut pages = vec![0; PAGE * usize::from(1 + (choice >> 4))];
    let decoder = if choice & 8 == 0 { Some(method.decoder()) } else { method.stock_decoder() };
    let Some(mut decoder) = decoder else { return };
    let first = decoder.decode(encoded, &mut pages);
    if choice & 8 == 0 {
        // Nothing carries over between packets of our own peers.
        let before = pages.clone();
        assert_eq!(decoder.decode(encoded, &mut pages), first);
        assert!(first.is_err() || pages == before);
    } else {
        let _ = decoder.decode(encoded, &mut pages);
    }
});
