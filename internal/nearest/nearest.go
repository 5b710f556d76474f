// Package nearest finds the word that somebody meant who has misspelt it.
package nearest

import (
	"fmt"
	"strings"
)

// Of is the candidate that differs from word in the fewest letters to insert, delete, change or swap; the first of equals, ""
// where there are no candidates.
func Of(word string, candidates []string) string {
	best, fewest := "", -1
	for _, c := range candidates {
		if d := distance(word, c); fewest < 0 || d < fewest {
			best, fewest = c, d
		}
	}
	return best
}

// Meant is Of where the word is likely to mean the candidate: it is its beginning, or differs in a letter and another for
// every three; else "".
func Meant(word string, candidates []string) string {
	best := Of(word, candidates)
	if word != "" && distance(word, best) <= 1+len(word)/3 {
		return best
	}
	for _, c := range candidates {
		if word != "" && strings.HasPrefix(c, word) {
			return c
		}
	}
	return ""
}

// Known ends an error about a word that is none of the candidates: what was meant, and what there is.
func Known(word string, candidates []string) string {
	list := "nown are: " + strings.Join(candidates, ", ")
	if meant := Meant(word, candidates); meant != "" {
		return fmt.Sprintf("did you mean %q? K%s", meant, list)
	}
	return "k" + list
}

// distance counts the letters to insert, delete, change or swap with their neighbour to make b of a.
func distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		for j := range rows[i] {
			if i == 0 || j == 0 {
				rows[i][j] = i + j
				continue
			}
			change := rows[i-1][j-1]
			if a[i-1] != b[j-1] {
				change++
			}
			rows[i][j] = min(change, rows[i-1][j]+1, rows[i][j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
