# The project's commands. Each is a script in scripts/, which says what it does.

# For `make demo`: qemu or synthetic, and flags of `transship move`.
VM = qemu
ARGS =
# For `make fuzz`: seconds for each target.
FUZZ_SECONDS = 20

.PHONY: demo test lint fuzz setup
demo: ; scripts/demo.sh $(VM) $(ARGS)
test: ; scripts/test.sh
lint: ; scripts/lint.sh
fuzz: ; scripts/fuzz.sh $(FUZZ_SECONDS)
setup: ; scripts/setup.sh
