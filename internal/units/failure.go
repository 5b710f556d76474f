package units

import "cmp"

// FailureCode says why an operation failed on every rank. The numbers travel on the wire.
type FailureCode int

// Failure codes.
const (
	FailMismatch    FailureCode = iota + 1 // ranks used one name for different operations
	FailStall                              // ranks did not come within the stall-shutdown time
	FailMemory                             // the server's memory limit
	FailUnsupported                        // for example a broadcast whose root has joined
)

func (c FailureCode) String() string {
	names := map[FailureCode]string{FailMismatch: "mismatch", FailStall: "stall", FailMemory: "memory"}
	return cmp.Or(names[c], "unsupported")
}
