// Package pattern matches names of tensors: path.Match's patterns, but a slash is an ordinary character,
// because layers are called "encoder/0/weight" as well as "encoder.0.weight".
package pattern

import (
	"fmt"
	"path"
	"strings"
)

// plain hides slashes, which path.Match treats as separators.
var plain = strings.NewReplacer("/", "\x00")

// Check reports what is wrong with a pattern.
func Check(p string) error {
	if _, err := path.Match(plain.Replace(p), ""); err != nil {
		return fmt.Errorf("%q is not a pattern of names: %w", p, err)
	}
	return nil
}

// Match reports whether a name fits a pattern that Check has accepted, or equals it.
func Match(p, name string) bool {
	ok, _ := path.Match(plain.Replace(p), plain.Replace(name))
	return ok || p == name
}
