//! Finds the system's ISA-L and compiles the shim that keeps its structures on the C side.
//!
//! Shared by default, because distributions ship no archive of it; with `LIBISAL_STATIC=1` and a `libisal.a` in the
//! library path it is linked in (that variable is pkg-config's own convention).

fn main() {
    println!("cargo:rerun-if-changed=src/shim.c");
    let library = match pkg_config::Config::new().atleast_version("2.29").probe("libisal") {
        Ok(library) => library,
        Err(error) => {
            eprintln!(
                "error: ISA-L 2.29 or newer was not found by pkg-config; install libisal-dev (Debian, Ubuntu) or"
            );
            eprintln!("       isa-l-devel (Fedora), or point PKG_CONFIG_PATH at the folder of libisal.pc\n\n{error}");
            std::process::exit(1);
        }
    };
    cc::Build::new().file("src/shim.c").includes(&library.include_paths).opt_level(2).compile("transship_isal_shim");
}
