package stream

import (
	"net"

	"github.com/paceline/paceline/transport/auth"
)

// What one end of a connection asks for; the higher of both ends' levels holds. Everything but the payloads of tensors has
// authentication tags in any case.
const (
	IntegrityByHost  = ""        // all, but control where both ends are on one host
	IntegrityControl = "control" // not the payloads of tensors
	IntegrityAll     = "all"     // these, too
)

// level is what this end asks for on a connection without TLS.
func (c Config) level(nc net.Conn) auth.Level {
	if c.Integrity == IntegrityControl || c.Integrity == IntegrityByHost && onOneHost(nc.LocalAddr(), nc.RemoteAddr()) {
		return auth.Control
	}
	return auth.All
}

func onOneHost(a, b net.Addr) bool {
	x, _, errX := net.SplitHostPort(a.String())
	y, _, errY := net.SplitHostPort(b.String())
	return errX == nil && errY == nil && x == y
}
