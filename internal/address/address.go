// Package address holds a server's addresses: one per kind of transport, each in a notation of its own.
package address

import (
	"fmt"
	"slices"
	"strings"

	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/limits"
)

// Address is a server's address for one kind of transport.
type Address struct {
	Kind string `json:"kind"` // of the transport, for example "tcp"
	At   string `json:"at"`   // in the notation of that kind, for example "10.0.0.1:4711"
}

// String gives the kind and the place: "tcp 10.0.0.1:4711".
func (a Address) String() string { return a.Kind + " " + a.At }

// List is all addresses of one server, at most one of each kind. Their order has no meaning: the connecting
// side has its own order of preference. A node without a server has none.
type List []Address

// String gives all of them, for messages.
func (l List) String() string {
	return strings.Join(each.Of(l, Address.String), ", ")
}

// Of is the address of one kind.
func (l List) Of(kind string) (at string, ok bool) {
	for _, a := range l {
		if a.Kind == kind {
			return a.At, true
		}
	}
	return "", false
}

// Shares reports whether two lists have an address in common: they belong to one server, or to two that compete for a place.
func (l List) Shares(other List) bool {
	return slices.ContainsFunc(l, func(a Address) bool { return slices.Contains(other, a) })
}

// Check reports the first violation of a bound in a list from outside.
func (l List) Check() error {
	if len(l) > limits.MaxAddresses {
		return fmt.Errorf("%d addresses, limit %d", len(l), limits.MaxAddresses)
	}
	for i, a := range l {
		switch _, twice := l[:i].Of(a.Kind); {
		case a.Kind == "" || a.At == "":
			return fmt.Errorf("address %q of kind %q: neither may be empty", a.At, a.Kind)
		case len(a.Kind)+len(a.At) > limits.MaxAddress:
			return fmt.Errorf("address of %d bytes, limit %d", len(a.Kind)+len(a.At), limits.MaxAddress)
		case twice:
			return fmt.Errorf("two addresses of kind %q", a.Kind)
		}
	}
	return nil
}
