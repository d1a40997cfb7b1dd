# Two commands matter: `make demo` and `make test`. Both install what they need (Debian, as root) and build first.
# The build folder lies outside the clone, so that a second clone starts warm; CARGO_TARGET_DIR moves it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CACHE := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)
export CARGO_TARGET_DIR ?= $(CACHE)/drumsbench/target

# Everything but what names the AWS SDK, which takes minutes to build: `make test-ec2`.
ALL := --workspace --exclude drums-ec2

.PHONY: help test test-ec2 demo demo-clean build image install prepare-build prepare-demo prepare-test

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# A static pattern: make skips implicit rules for phony targets.
prepare-build prepare-demo prepare-test: prepare-%:
	@infra/prepare $*

build: prepare-build ## Build every binary (debug) into $CARGO_TARGET_DIR
	cargo build --locked $(ALL) --bins --tests

PREFIX ?= /usr/local
install: prepare-build ## Build for production and put the three programs into $(PREFIX)/bin
	cargo build --locked --release -p drums-coordinator -p drums-agent
	install -D -m 755 -t "$(DESTDIR)$(PREFIX)/bin" "$$CARGO_TARGET_DIR"/release/{drums-coordinator,drumsctl,drums-agent}

OUT ?= target/images/minimal
image: prepare-demo ## Build the minimal workload into the folder $(OUT)
	cargo build --locked --profile quick -p xtask
	@"$$CARGO_TARGET_DIR/quick/xtask" image minimal --out "$(OUT)"

demo: prepare-demo ## Run EXP-028 for real on this machine: eight arms, two agents, one verdict
	cargo build --locked --profile quick -p xtask -p drums-agent -p drums-coordinator
	@"$$CARGO_TARGET_DIR/quick/xtask" demo

demo-clean: prepare-build ## Remove what a crashed demo left behind
	cargo build --locked --profile quick -p xtask -p drums-agent -p drums-coordinator
	@"$$CARGO_TARGET_DIR/quick/xtask" demo-clean

# One selection of packages and targets for everything: cargo then builds each dependency once, with one set of features.
test: prepare-test ## Everything that is checked: `cargo xtask check`, then all tests; names what was skipped
	cargo fetch --locked --target x86_64-unknown-linux-gnu
	cargo build --locked $(ALL) --bins --tests
	"$$CARGO_TARGET_DIR/debug/xtask" check
	status=0; cargo nextest run --locked $(ALL) || status=$$?; cargo test --locked --quiet --doc -p drums-provider || status=$$?; "$$CARGO_TARGET_DIR/debug/xtask" skips || status=$$?; exit $$status

# The programs of the virtual environment that infra/prepare made for the tests' AWS.
EMULATOR := $(CACHE)/drumsbench/moto/bin
SERVER := $(CARGO_TARGET_DIR)/images/server
test-ec2: prepare-test ## What runs in AWS: the tests' own AWS, what is deployed there, and the package that calls it
	cargo build --locked $(ALL) --bins --tests
	"$$CARGO_TARGET_DIR/debug/xtask" image server --out "$(SERVER)"
	cd infra/emulator && DRUMS_SERVER_IMAGE="$(SERVER)" $(EMULATOR)/python -m unittest discover -b -t . -s tests
	cd infra/cloud && PYTHONPATH=../emulator $(EMULATOR)/python -m unittest discover -b -t . -s checks
	infra/ec2/cargo clippy
	infra/ec2/cargo nextest
