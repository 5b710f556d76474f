package units

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
	switch c {
	case FailMismatch:
		return "mismatch"
	case FailStall:
		return "stall"
	case FailMemory:
		return "memory"
	default:
		return "unsupported"
	}
}
