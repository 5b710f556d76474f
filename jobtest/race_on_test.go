//go:build race

package jobtest_test

// race reports whether the race detector is on, under which everything takes ten times as long.
const race = true
