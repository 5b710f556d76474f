//go:build !cgo

package codec

// engines lists what this build can run: without a C compiler that is the reference.
func engines() []engine { return []engine{reference{}} }
