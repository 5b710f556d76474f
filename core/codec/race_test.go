//go:build race

package codec

// raceEnabled: the race detector makes sync.Pool forget at random.
const raceEnabled = true
