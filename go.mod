module github.com/paceline/paceline

go 1.25.0
