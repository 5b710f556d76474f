//go:build cgo

package fabric

import "github.com/paceline/paceline/internal/lockorder"

// All locks of the fabric, in the order in which they are locked. They are below those of the roles: a role may send while
// it holds one of its own. conn.mu is released where a goroutine waits for a peer (sync.Cond).
const (
	levelConn   lockorder.Level = iota + 200 // conn.mu: the stream's two ends
	levelRegion                              // region.mu: who reads into registered memory
	levelDevice                              // device.mu: connections, regions, and slots of messages
	levelUp                                  // device.up: the endpoint; all that uses it reads, down locks
)
