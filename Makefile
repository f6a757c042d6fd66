# The project's commands. Each is a script in scripts/, which says what it does.

# For `make demo`: qemu, synthetic or clones, and flags of `transship move`.
VM = qemu
ARGS =
# For `make fuzz`: seconds for each target.
FUZZ_SECONDS = 20
# For `make loom`: flags of the test program, such as names of models, or --skip NAME.
LOOM =
# For `make install`: where to.
PREFIX = /usr/local
# For `make try-deb`: releases of Debian.
RELEASES = bookworm trixie
# For `make soak`: how many moves, and the seed of all choices.
MOVES = 100
SEED = 1

.PHONY: demo test test-long soak mutants lint msrv fuzz loom setup install deb try-deb
demo: ; scripts/demo.sh $(VM) $(ARGS)
test: ; scripts/test.sh
# Those that `make test` leaves out, because each takes long.
test-long: ; scripts/test.sh --ignored
# One guest, moved again and again while somebody is killed or held.
soak: ; scripts/soak.sh --moves $(MOVES) --seed $(SEED)
# For `make mutants`: which parts (memory, wire, engine, guard); all of them take hours.
mutants: ; scripts/mutants.sh $(PARTS)
lint: ; scripts/lint.sh
# With the oldest Rust that the README promises.
msrv: ; scripts/msrv.sh
fuzz: ; scripts/fuzz.sh $(FUZZ_SECONDS)
# Every interleaving of small cases of the rings and the parker: minutes.
loom: ; RUSTFLAGS="--cfg loom" cargo test -p transship-ring --release --lib --locked --target-dir target/loom -- $(LOOM)
setup: ; scripts/setup.sh
install: ; scripts/install.sh $(PREFIX)
# A Debian package, in target/debian.
deb: ; scripts/package.sh
# Installs and removes it in fresh roots: needs root and debootstrap.
try-deb: ; scripts/try-package.sh $(RELEASES)
