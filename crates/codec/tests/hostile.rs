//! Bytes from a peer that lies: every answer is an error or full pages, in bounded memory and time.
use crate::common::{PAGE, encode, mixed, page, settings};
use proptest::{prelude::*, sample::Index};
use transship_codec::{Decoder, Fault, Method, Setting};

fn decoders(method: Method) -> Vec<Box<dyn Decoder>> {
    std::iter::once(method.decoder()).chain(method.stock_decoder()).collect()
}

/// For the stock decoders each packet is a channel's first.
fn first_packet(setting: Setting, pages: &[u8]) -> [Vec<u8>; 2] {
    let own = encode(setting, pages);
    let header: &[u8] = if setting.method() == Method::Zlib { &transship_codec::ZLIB_STREAM_HEADER } else { &[] };
    let stock = [header, &own].concat();
    [own, stock]
}

#[test]
fn a_packet_cut_anywhere_is_refused() {
    let pages = [page(2, 1), page(3, 2)].concat();
    for setting in settings() {
        let packets = first_packet(setting, &pages);
        let stride = if setting.method() == Method::None { 97 } else { 1 };
        for cut in (0..packets[0].len()).step_by(stride) {
            let mut decoded = vec![0; pages.len()];
            let result = setting.method().decoder().decode(&packets[0][..cut], &mut decoded);
            let Err(error) = result else { panic!("{setting} cut at {cut} of {}", packets[0].len()) };
            assert_eq!((error.encoded, error.expected), (cut, pages.len()));
            assert!(!matches!(error.fault, Fault::Trailing { .. } | Fault::TooLong), "{setting} cut at {cut}: {error}");
            // In a stream, what is missing may come with the next packet; but the pages are not full, or it goes on
            // rightly.
            if let Some(mut decoder) = setting.method().stock_decoder() {
                let result = decoder.decode(&packets[1][..cut], &mut decoded);
                assert!(result.is_err() || decoded == pages, "{setting} cut at {cut}");
            }
        }
    }
}

#[test]
fn bytes_left_over_are_refused() {
    let pages = mixed(3);
    for setting in settings() {
        for extra in [&[0u8][..], &[0; 9], &[0xff; 3], b"more bytes than any lookahead takes in one go"] {
            for (encoded, mut decoder) in first_packet(setting, &pages).into_iter().zip(decoders(setting.method())) {
                let longer = [&encoded, extra].concat();
                assert!(decoder.decode(&longer, &mut vec![0; pages.len()]).is_err(), "{setting} with {extra:?}");
            }
        }
        let twice = encode(setting, &pages).repeat(2);
        assert!(setting.method().decoder().decode(&twice, &mut vec![0; pages.len()]).is_err(), "{setting} twice");
    }
}

/// A bomb: a few bytes that would make far more than the pages that were announced.
#[test]
fn a_bomb_makes_no_more_than_the_pages() {
    let bomb = vec![0; 128 * PAGE];
    for setting in settings() {
        for (encoded, mut decoder) in first_packet(setting, &bomb).into_iter().zip(decoders(setting.method())) {
            for pages in [PAGE, 127 * PAGE, 128 * PAGE - 1] {
                let error = decoder.decode(&encoded, &mut vec![0; pages]).unwrap_err();
                let is_named = matches!(error.fault, Fault::TooLong | Fault::Broken | Fault::Trailing { .. })
                    || setting.method() == Method::Lz4 && matches!(error.fault, Fault::Corrupt { .. });
                assert!(is_named, "{setting}: {error}");
            }
        }
    }
}

#[test]
fn too_few_pages_are_refused() {
    let pages = mixed(2);
    for setting in settings() {
        for (encoded, mut decoder) in first_packet(setting, &pages).into_iter().zip(decoders(setting.method())) {
            let error = decoder.decode(&encoded, &mut vec![0; 3 * PAGE]).unwrap_err();
            let (Fault::Truncated { made } | Fault::Trailing { extra: made }) = error.fault else {
                panic!("{setting}: {error}")
            };
            assert_eq!(made, 2 * PAGE, "{setting}");
        }
    }
}

#[test]
fn another_methods_packet_is_refused() {
    let pages = mixed(4);
    for setting in settings() {
        for method in Method::ALL {
            if method != setting.method() {
                let mut decoded = vec![0; pages.len()];
                let result = method.decoder().decode(&encode(setting, &pages), &mut decoded);
                assert!(result.is_err() || decoded == pages, "{setting} read as {method}");
            }
        }
    }
}

/// A zstd frame that wants a window of 1 GiB, in a stream: refused by its header, before any memory is taken.
#[test]
fn a_huge_window_is_refused() {
    let frame = [0x28, 0xb5, 0x2f, 0xfd, 0x00, (30 - 10) << 3, 0x01, 0x00, 0x00];
    let error = Method::Zstd.stock_decoder().unwrap().decode(&frame, &mut [0; PAGE]).unwrap_err();
    assert!(matches!(error.fault, Fault::Corrupt { .. }), "{error}");
}

#[test]
fn a_finished_zlib_stream_is_refused() {
    let mut stream = transship_codec::ZLIB_STREAM_HEADER.to_vec();
    stream.extend(encode(Setting::new(Method::Zlib, None).unwrap(), &[7; PAGE]));
    stream.extend([3, 0]);
    let error = Method::Zlib.stock_decoder().unwrap().decode(&stream, &mut [0; PAGE]).unwrap_err();
    assert_eq!(error.fault, Fault::StreamEnd);
}

#[test]
fn a_broken_channel_stays_broken() {
    for method in [Method::Zlib, Method::Zstd] {
        let mut decoder = method.stock_decoder().unwrap();
        let good = first_packet(Setting::new(method, None).unwrap(), &mixed(1))[1].clone();
        assert!(decoder.decode(b"no such stream", &mut [0; PAGE]).is_err());
        assert_eq!(decoder.decode(&good, &mut [0; PAGE]).unwrap_err().fault, Fault::Broken);
    }
}

#[test]
fn a_qatzip_member_that_lies_is_refused() {
    let pages = mixed(2);
    let good = encode(Setting::new(Method::Qatzip, None).unwrap(), &pages);
    let end = good.len();
    let changed = |at: usize| {
        let mut bad = good.clone();
        bad[at] ^= 1;
        Method::Qatzip.decoder().decode(&bad, &mut vec![0; pages.len()]).map_err(|e| e.fault)
    };
    for at in [0, 1, 2, 3, 10, 11, 12, 13, 14, 15] {
        assert!(matches!(changed(at), Err(Fault::Corrupt { .. })), "byte {at}");
    }
    assert!(matches!(changed(16), Err(Fault::Field { field: "a member's size", .. })));
    assert!(changed(20).is_err());
    assert!(matches!(changed(end - 8), Err(Fault::Checksum { .. })));
    assert!(matches!(changed(end - 4), Err(Fault::Field { .. })));
    // Time, flags and system of a gzip header mean nothing here.
    assert_eq!(changed(4), Ok(()));
    assert_eq!(changed(8), Ok(()));
}

#[test]
fn the_message_says_what_is_wrong() {
    let error = Method::Lz4.decoder().decode(&[0; 5], &mut [0; PAGE]).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("lz4 packet of 5 bytes for 4096 bytes of pages: it is corrupt or of another method"),
        "{error}"
    );
    let error = Method::None.decoder().decode(&[0; 5], &mut [0; PAGE]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "none packet of 5 bytes for 4096 bytes of pages: it ends early, after 5 bytes of pages"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn noise_never_hurts(bytes in proptest::collection::vec(any::<u8>(), 0..600), pages in 1usize..4) {
        for method in Method::ALL {
            for mut decoder in decoders(method) {
                let _ = decoder.decode(&bytes, &mut vec![0; pages * PAGE]);
                let _ = decoder.decode(&bytes, &mut vec![0; pages * PAGE]);
            }
        }
    }

    #[test]
    fn flipped_bits_never_hurt(
        which in any::<Index>(),
        flips in proptest::collection::vec((any::<Index>(), 0u8..8), 1..6),
    ) {
        let pages = mixed(5);
        let settings = settings();
        let setting = settings[which.index(settings.len())];
        for (mut encoded, mut decoder) in first_packet(setting, &pages).into_iter().zip(decoders(setting.method())) {
            for (at, bit) in &flips {
                let at = at.index(encoded.len());
                encoded[at] ^= 1 << bit;
            }
            let mut decoded = vec![0; pages.len()];
            let result = decoder.decode(&encoded, &mut decoded);
            // Only QATzip's format has a checksum; what it accepts must be right.
            if setting.method() == Method::Qatzip && result.is_ok() {
                prop_assert!(decoded == pages);
            }
        }
    }
}
