//go:build !cgo

package reduce

// engines lists the engines of this build: without a C compiler only the reference.
func engines() []engine { return []engine{reference{}} }
