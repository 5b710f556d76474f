//go:build race

package node_test

// race reports whether the race detector is on, under which everything takes ten times as long.
const race = true
