//! What was encoded is decoded, whatever the pages, in any order, by any decoder of the method.
use crate::common::{PAGE, encode, mixed, page, pages, settings};
use proptest::prelude::*;
use transship_codec::{Method, Outcome, Setting};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn every_method_gives_the_pages_back(pages in pages(128)) {
        for setting in settings() {
            let encoded = encode(setting, &pages);
            let mut decoded = vec![0xaa; pages.len()];
            setting.method().decoder().decode(&encoded, &mut decoded).unwrap();
            prop_assert!(decoded == pages, "{}", setting);
        }
    }

    /// One encoder serves many channels: nothing may carry over from packet to packet, on either side.
    #[test]
    fn packets_stand_for_themselves(first in pages(8), second in pages(8)) {
        for setting in settings() {
            let mut encoder = setting.encoder();
            let (mut a, mut b) = (Vec::new(), Vec::new());
            let _ = encoder.encode(&first, &mut a);
            let _ = encoder.encode(&second, &mut b);
            prop_assert!(b == encode(setting, &second), "{}", setting);
            let mut decoder = setting.method().decoder();
            for (encoded, pages) in [(&b, &second), (&a, &first), (&b, &second)] {
                let mut decoded = vec![0; pages.len()];
                decoder.decode(encoded, &mut decoded).unwrap();
                prop_assert!(&decoded == pages, "{}", setting);
            }
        }
    }

    /// What a stock QEMU's channel gets, read as it is there.
    #[test]
    fn packets_in_a_row_are_a_stock_stream(packets in proptest::collection::vec(pages(16), 1..6)) {
        for setting in settings() {
            let Some(mut decoder) = setting.method().stock_decoder() else { continue };
            for (i, pages) in packets.iter().enumerate() {
                let has_header = i == 0 && setting.method() == Method::Zlib;
                let header: &[u8] = if has_header { &transship_codec::ZLIB_STREAM_HEADER } else { &[] };
                let encoded = [header, &encode(setting, pages)].concat();
                let mut decoded = vec![0; pages.len()];
                decoder.decode(&encoded, &mut decoded).unwrap();
                prop_assert!(&decoded == pages, "{}", setting);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Pages that go as they are among encoded ones: one packet encoded, one stored, as a channel of a stock QEMU has
    /// them.
    #[test]
    fn stored_pages_fit_into_a_stock_stream(packets in proptest::collection::vec(pages(128), 2..5)) {
        for method in [Method::Zlib, Method::Zstd] {
            let (mut storer, mut decoder) = (method.storing_encoder().unwrap(), method.stock_decoder().unwrap());
            for (i, pages) in packets.iter().enumerate() {
                let header = if i == 0 && method == Method::Zlib { &transship_codec::ZLIB_STREAM_HEADER[..] } else { &[] };
                let mut packet = encode(Setting::new(method, None).unwrap(), pages);
                if i % 2 == 0 {
                    prop_assert_eq!(storer.encode(pages, &mut packet), Outcome::Raw);
                    prop_assert!(packet.len() > pages.len() && packet.len() < pages.len() + pages.len() / 128);
                    let mut alone = vec![0; pages.len()];
                    method.decoder().decode(&packet, &mut alone).unwrap();
                    prop_assert!(&alone == pages, "{}", method);
                }
                let mut decoded = vec![0; pages.len()];
                decoder.decode(&[header, &packet].concat(), &mut decoded).unwrap();
                prop_assert!(&decoded == pages, "{}", method);
            }
        }
    }
}

#[test]
fn the_slowest_levels_work_too() {
    let pages = mixed(40);
    for (method, level) in
        [(Method::Zlib, 9), (Method::Zstd, 19), (Method::Zstd, 20), (Method::Qatzip, 9), (Method::Lz4, 12)]
    {
        let setting = Setting::new(method, Some(level)).unwrap();
        let mut decoded = vec![0; pages.len()];
        method.decoder().decode(&encode(setting, &pages), &mut decoded).unwrap();
        assert!(decoded == pages, "{setting}");
    }
}

#[test]
fn the_outcome_says_what_is_worth_it() {
    let noise: Vec<u8> = (0..128).flat_map(|i| page(1, i)).collect();
    let text: Vec<u8> = (0..128).flat_map(|i| page(2, i)).collect();
    for setting in settings() {
        let (mut encoder, mut out) = (setting.encoder(), Vec::new());
        assert_eq!(encoder.encode(&noise, &mut out), Outcome::Raw, "{setting}");
        assert!(out.len() < noise.len() + noise.len() / 128, "{setting}: noise grew to {}", out.len());
        let expected = if setting.method() == Method::None { Outcome::Raw } else { Outcome::Encoded };
        assert_eq!(encoder.encode(&text, &mut out), expected, "{setting}");
        assert!(setting.method() == Method::None || out.len() < text.len() * 2 / 3, "{setting}: text is {}", out.len());
    }
}

/// QEMU's receivers take at most 1 MiB a packet, and its own packets are of 512 KiB.
#[test]
fn a_stock_packet_fits_its_receiver() {
    let noise: Vec<u8> = (0..128).flat_map(|i| page(1, i)).collect();
    for setting in settings() {
        assert!(encode(setting, &noise).len() < 1 << 20);
        assert_eq!(noise.len(), 128 * PAGE);
    }
}
