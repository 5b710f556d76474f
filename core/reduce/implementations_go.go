//go:build !cgo

package reduce

// implementations lists the implementations of this build: without a C compiler only the reference.
func implementations() []implementation { return []implementation{reference{}} }
