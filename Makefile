# Two commands matter: `make demo` and `make test`. Both install what they need (Debian, as root) and build first.
# The build folder lies outside the clone, so that a second clone starts warm; CARGO_TARGET_DIR moves it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CACHE := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)
export CARGO_TARGET_DIR ?= $(CACHE)/drumsbench/target

.PHONY: help test demo demo-clean build prepare-build prepare-demo prepare-test

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# A static pattern: make skips implicit rules for phony targets.
prepare-build prepare-demo prepare-test: prepare-%:
	@infra/prepare $*

build: prepare-build ## Build every binary (debug) into $CARGO_TARGET_DIR
	cargo build --locked --workspace --bins --tests

demo: prepare-demo ## Run EXP-028 for real on this machine: eight arms, two agents, one verdict
	cargo build --locked --release -p xtask -p drums-agent -p drums-coordinator
	@"$$CARGO_TARGET_DIR/release/xtask" demo

demo-clean: prepare-build ## Remove what a crashed demo left behind
	cargo build --locked --release -p xtask -p drums-agent -p drums-coordinator
	@"$$CARGO_TARGET_DIR/release/xtask" demo-clean

# One selection of packages and targets for everything: cargo then builds each dependency once, with one set of features.
test: prepare-test ## Everything that is checked: `cargo xtask check`, then all tests; names what was skipped
	cargo build --locked --workspace --bins --tests
	"$$CARGO_TARGET_DIR/debug/xtask" check
	status=0; cargo nextest run --locked --workspace || status=$$?; "$$CARGO_TARGET_DIR/debug/xtask" skips || status=$$?; exit $$status
