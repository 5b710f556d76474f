//go:build !invariants

package invariant

// On reports whether this build checks invariants.
const On = false
