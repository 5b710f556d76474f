// Package name says what may be a name: of a tensor, a held value or a group of values.
package name

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/paceline/paceline/internal/limits"
)

// Check reports why a text is no name. Names end with a NUL in C, and travel as UTF-8: what breaks either would be
// another name at another place.
func Check(text string) error {
	switch {
	case text == "" || len(text) > limits.MaxName:
		return fmt.Errorf("a name of %d bytes, allowed are 1 to %d", len(text), limits.MaxName)
	case strings.ContainsRune(text, 0):
		return fmt.Errorf("the name %.80q, which has a NUL at byte %d, where names end in C", text, strings.IndexByte(text, 0))
	case !utf8.ValidString(text):
		return fmt.Errorf("the name %.80q, which is not UTF-8", text)
	}
	return nil
}
