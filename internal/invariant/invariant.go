// Package invariant checks what must always be true, in builds with the tag "invariants" (the tests and
// the race build). Elsewhere On is a false constant and the checks
// that it guards are not compiled in.
package invariant

import "fmt"

// Check panics with the message when ok is false. Guard the call by On, so that neither the
// condition nor its arguments cost anything where checks are off:
//
//	if invariant.On {
//		invariant.Check(head <= tail, "ring: head %d behind tail %d", head, tail)
//	}
func Check(ok bool, format string, args ...any) {
	if On && !ok {
		panic("invariant broken: " + fmt.Sprintf(format, args...))
	}
}
