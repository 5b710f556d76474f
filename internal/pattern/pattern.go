// Package pattern matches names of tensors: path.Match's patterns, to which a slash is a character like any
// other, because layers are called "encoder/0/weight" as well as "encoder.0.weight".
package pattern

import (
	"fmt"
	"path"
	"strings"
)

// plain hides slashes, which to path.Match are more than a character.
var plain = strings.NewReplacer("/", "\x00")

// Check reports what is wrong with a pattern.
func Check(p string) error {
	if _, err := path.Match(plain.Replace(p), ""); err != nil {
		return fmt.Errorf("%q is no pattern of names: %w", p, err)
	}
	return nil
}

// Match reports whether a name fits a pattern that Check has accepted, or is the very same text.
func Match(p, name string) bool {
	ok, _ := path.Match(plain.Replace(p), plain.Replace(name))
	return ok || p == name
}
