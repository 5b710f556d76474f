// Package unique makes numbers that no other process makes.
package unique

import (
	"crypto/rand"
	"encoding/binary"
)

// Number returns 64 random bits of the system. math/rand has its first bits from what the kernel gives a program at its
// start: processes that were forked from one, and then loaded this library, would all make the same numbers.
func Number() uint64 {
	var b [8]byte
	rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:])
}
